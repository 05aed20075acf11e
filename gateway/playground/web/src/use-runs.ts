// The answers on the page, one or two for a comparison, and their chat.

import { useCallback, useRef, useState } from "preact/hooks";
import type { Api } from "./api";
import { forgetChats, keepChat, readChats, type Chat } from "./chats";
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
  chats: Chat[];
  start: () => Promise<void>;
  /** Another answer to the same turns. */
  again: () => void;
  /** Takes a chat back to before a turn of the user's, and returns that turn's text. */
  takeBack: (index: number) => string;
  open: (chat: Chat) => void;
  forget: () => void;
  /** Takes up an answer that ended with an error after its last event. */
  goOn: (run: Run) => void;
  stop: () => void;
  clear: () => void;
  mark: (change: Change) => void;
}

interface State {
  /** Of the chat, as it is kept. */
  id: string;
  main: Run | null;
  plain: Run | null;
  mustAgree: boolean;
  history: Turn[];
}

const NUM_RECENT = 16;
const NUM_SEEDS = 2 ** 31;

export function useRuns(api: Api, settings: Settings): Runs {
  const state = useRef<State>(nothing());
  const stopper = useRef<AbortController | null>(null);
  const chats = useRef<Chat[]>(readChats());
  const redraw = useRedraw();

  const run = async (history: Turn[], seed?: number) => {
    stopper.current?.abort();
    const { signal } = (stopper.current = new AbortController());
    const main = new Run(settings.method !== "off");
    const plain = settings.compare ? new Run(false) : null;
    const { id } = state.current;
    state.current = { id, main, plain, mustAgree: isReproducible(settings) || seed !== undefined, history };
    redraw();
    const path = pathOf(settings);
    const first = follow(main, api, path, bodyOf(settings, history, settings.method, seed), signal, redraw).then(() => {
      if (settings.kind === "chat" && main.text) chats.current = keepChat({ id, turns: [...history, answerOf(main)] });
    });
    if (plain !== null && !settings.atOnce) await first;
    if (signal.aborted || plain === null) return first;
    await Promise.all([first, follow(plain, api, path, bodyOf(settings, history, "off", seed), signal, redraw)]);
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

  const become = (next: State) => {
    stopper.current?.abort();
    state.current = next;
    redraw();
  };

  const { main, plain, mustAgree, history } = state.current;
  const isRunning = [main, plain].some((run) => run !== null && !run.isOver) && !(stopper.current?.signal.aborted ?? true);
  return {
    main,
    plain,
    mustAgree,
    history,
    isRunning,
    drafting: main !== null && !main.isOver ? drafterOf(main) : "",
    chats: chats.current,
    start: () => run(settings.kind === "chat" ? [...turnsOf(state.current), userTurn(settings)] : []),
    // Of the same seed it would be the same answer.
    again: () => void run(state.current.history, Math.floor(Math.random() * NUM_SEEDS)),
    takeBack: (index) => {
      const text = history[index]?.content ?? "";
      become({ ...nothing(), id: state.current.id, history: history.slice(0, index) });
      return text;
    },
    open: (chat) => become({ ...nothing(), id: chat.id, history: chat.turns }),
    forget: () => {
      forgetChats();
      chats.current = [];
      redraw();
    },
    goOn,
    stop: () => {
      stopper.current?.abort();
      // The other side of a comparison may not have begun.
      for (const one of [main, plain]) if (one !== null && !one.isOver) one.status = "stopped";
      redraw();
    },
    clear: () => become(nothing()),
    mark,
  };
}

function nothing(): State {
  return { id: String(Date.now()), main: null, plain: null, mustAgree: false, history: [] };
}

/** The drafter of the newest round with a draft. */
function drafterOf(run: Run): string {
  return run.segments.slice(-NUM_RECENT).findLast((segment) => segment.round.drafter)?.round.drafter ?? "";
}

function userTurn(settings: Settings): Turn {
  return { role: "user", content: settings.message };
}

function answerOf(run: Run): Turn {
  return { role: "assistant", content: run.text };
}

/** The chat so far, including the last answer; without a question that got none. */
function turnsOf({ main, history }: State): Turn[] {
  if (main === null) return history;
  return main.text ? [...history, answerOf(main)] : history.slice(0, -1);
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
