// The answers on the page, one or two for a comparison, and their chat.

import { useCallback, useRef, useState } from "preact/hooks";
import type { Api } from "./api";
import type { Change } from "./fleet";
import { follow, Run } from "./run";
import { bodyOf, isReproducible, pathOf, type Settings, type Turn } from "./settings";

export interface Runs {
  main: Run | null;
  /** The same request with speculation off, while comparing. */
  plain: Run | null;
  /** Whether the two must be identical. */
  mustAgree: boolean;
  /** A chat's turns before the answer. */
  history: Turn[];
  isRunning: boolean;
  /** Address of the drafter in use, while running. */
  drafting: string;
  start: () => Promise<void>;
  /** Takes up an answer that ended with an error after its last event. */
  goOn: (run: Run) => void;
  stop: () => void;
  clear: () => void;
  mark: (change: Change) => void;
}

interface State {
  main: Run | null;
  plain: Run | null;
  mustAgree: boolean;
  history: Turn[];
}

const NUM_RECENT = 16;
const NOTHING: State = { main: null, plain: null, mustAgree: false, history: [] };

export function useRuns(api: Api, settings: Settings): Runs {
  const state = useRef<State>(NOTHING);
  const stopper = useRef<AbortController | null>(null);
  const redraw = useRedraw();

  const start = async () => {
    stopper.current?.abort();
    const { signal } = (stopper.current = new AbortController());
    const history = settings.kind === "chat" ? [...withAnswer(state.current), userTurn(settings)] : [];
    const main = new Run(settings.method !== "off");
    const plain = settings.compare ? new Run(false) : null;
    state.current = { main, plain, mustAgree: isReproducible(settings), history };
    redraw();
    const path = pathOf(settings);
    const first = follow(main, api, path, bodyOf(settings, history), signal, redraw);
    if (plain === null) return first;
    if (settings.inTurn) await first;
    await Promise.all([first, follow(plain, api, path, bodyOf(settings, history, "off"), signal, redraw)]);
  };

  const goOn = (run: Run) => {
    if (stopper.current === null || stopper.current.signal.aborted) stopper.current = new AbortController();
    run.status = "resuming";
    run.failure = null;
    redraw();
    void follow(run, api, "", {}, stopper.current.signal, redraw);
  };

  const mark = (change: Change) => {
    for (const run of [state.current.main, state.current.plain]) {
      if (run?.status === "streaming") run.marks.push({ ...change, at: run.segments.length });
    }
    redraw();
  };

  const { main, plain, mustAgree, history } = state.current;
  const isRunning = [main, plain].some((run) => run !== null && !run.isOver);
  return {
    main,
    plain,
    mustAgree,
    history,
    isRunning,
    drafting: main !== null && !main.isOver ? drafterOf(main) : "",
    start,
    goOn,
    stop: () => stopper.current?.abort(),
    clear: () => {
      stopper.current?.abort();
      state.current = NOTHING;
      redraw();
    },
    mark,
  };
}

/** The drafter of the newest round with a draft. */
function drafterOf(run: Run): string {
  return run.segments.slice(-NUM_RECENT).findLast((segment) => segment.round.drafter)?.round.drafter ?? "";
}

function userTurn(settings: Settings): Turn {
  return { role: "user", content: settings.message };
}

/** The chat so far, including the last answer. */
function withAnswer(state: State): Turn[] {
  const text = state.main?.text ?? "";
  return text && state.history.length > 0 ? [...state.history, { role: "assistant", content: text }] : [];
}

/** Redraws at most once per frame. */
function useRedraw(): () => void {
  const [, setVersion] = useState(0);
  const isScheduled = useRef(false);
  return useCallback(() => {
    if (isScheduled.current) return;
    isScheduled.current = true;
    requestAnimationFrame(() => {
      isScheduled.current = false;
      setVersion((version) => version + 1);
    });
  }, []);
}
