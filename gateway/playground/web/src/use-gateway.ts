// The gateway's state: key, model, and the fleet, polled every second.

import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import { Api, Refusal } from "./api";
import { changes, withDeparted, type Change } from "./fleet";
import type { Fleet, Model } from "./wire";

const KEY = "outrider.api-key";
const POLL_MS = 1000;

export interface Gateway {
  api: Api;
  setKey: (key: string) => void;
  /** Empty until they are known. */
  models: Model[];
  /** Why the model is unknown. */
  trouble: string;
  needsKey: boolean;
  /** See Api.docs. */
  docs: string;
}

export function useGateway(): Gateway {
  const [key, setKey] = useState(() => sessionStorage.getItem(KEY) ?? "");
  const api = useMemo(() => new Api(key), [key]);
  const [models, setModels] = useState<Model[]>([]);
  const [trouble, setTrouble] = useState("");
  const [needsKey, setNeedsKey] = useState(false);
  const [docs, setDocs] = useState("");

  useEffect(() => {
    let timer: ReturnType<typeof setTimeout> | undefined;
    let isCurrent = true;
    setNeedsKey(false); // until this key is refused too
    const look = async () => {
      try {
        const [found, docs] = await Promise.all([api.models(), api.docs()]);
        if (!isCurrent) return;
        setDocs(docs);
        setModels(found);
        setTrouble("");
      } catch (error) {
        if (!isCurrent) return;
        const isKeyless = isWrongKey(error) && !key; // the gateway's words are for programs then
        setTrouble(isKeyless ? "an API key is required" : error instanceof Refusal ? error.message : "The gateway does not answer.");
        if (isWrongKey(error)) setNeedsKey(true);
        else timer = setTimeout(look, 2 * POLL_MS);
      }
    };
    void look();
    return () => {
      isCurrent = false;
      clearTimeout(timer);
    };
  }, [api]);

  const keep = (text: string) => {
    // Only for this tab: a key on disk would outlive the session.
    if (text) sessionStorage.setItem(KEY, text);
    else sessionStorage.removeItem(KEY);
    setKey(text);
  };
  return { api, setKey: keep, models, trouble, needsKey, docs };
}

function isWrongKey(error: unknown): boolean {
  return error instanceof Refusal && error.detail.code === 401;
}

export interface FleetState {
  view: Fleet | null;
  /** The last poll failed: `view` is the state before. */
  isStale: boolean;
  /** While no verifier serves: how long the gateway still waits for one. */
  secondsLeft: number | null;
}

export function useFleet(gateway: Gateway, tell: (change: Change) => void): FleetState {
  const [state, setState] = useState<FleetState>({ view: null, isStale: false, secondsLeft: null });
  const latest = useRef(tell);
  latest.current = tell;
  const { api, needsKey } = gateway;

  useEffect(() => {
    if (needsKey) return;
    let timer: ReturnType<typeof setTimeout> | undefined;
    let isCurrent = true;
    let before: Fleet | null = null;
    let goneAtMs: number | null = null;
    const look = async () => {
      if (!document.hidden) {
        try {
          const now = withDeparted(before, await api.fleet());
          if (!isCurrent) return;
          changes(before, now).forEach((change) => latest.current(change));
          before = now;
          const serves = now.verifiers.length === 0 || now.verifiers.some((verifier) => verifier.healthy);
          goneAtMs = serves ? null : (goneAtMs ?? performance.now());
          const waitedS = goneAtMs === null ? 0 : (performance.now() - goneAtMs) / 1000;
          const secondsLeft = serves ? null : Math.max(0, Math.round(now.gateway.failover_s - waitedS));
          setState({ view: now, isStale: false, secondsLeft });
        } catch (error) {
          if (!isCurrent || isWrongKey(error)) return; // the header asks for another key
          setState({ view: before, isStale: true, secondsLeft: null });
        }
      }
      if (isCurrent) timer = setTimeout(look, POLL_MS);
    };
    void look();
    return () => {
      isCurrent = false;
      clearTimeout(timer);
    };
  }, [api, needsKey]);
  return state;
}
