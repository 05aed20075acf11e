import { NOISE, type Run } from "../run";

/** Compares the two answers byte by byte, and their speeds. */
export function Verdict(props: { main: Run; plain: Run; mustAgree: boolean }) {
  const speeds = inWords(props.main, props.plain);
  return (
    <>
      <Bytes {...props} />
      {speeds && <p class="speeds">{speeds}</p>}
    </>
  );
}

/** Empty while one of the speeds is not known. Within the noise the two are called equal. */
function inWords(main: Run, plain: Run): string {
  const [on, off] = [main.tokensPerS, plain.tokensPerS];
  if (main.status !== "done" || plain.status !== "done" || on === null || off === null) return "";
  const ratio = on / off;
  const speeds = `${on.toFixed(0)} tokens per second with it, ${off.toFixed(0)} without`;
  if (ratio > 1 + NOISE) return `Speculation made this answer ${ratio.toFixed(1)} times as fast: ${speeds}.`;
  if (ratio < 1 - NOISE) return `Speculation made this answer slower, at ${ratio.toFixed(2)} times the speed: ${speeds}.`;
  return `Speculation made no difference to the speed: ${speeds}.`;
}

function Bytes({ main, plain, mustAgree }: { main: Run; plain: Run; mustAgree: boolean }) {
  if (!main.isOver || !plain.isOver) {
    return (
      <p class="verdict" role="status">
        Comparing…
      </p>
    );
  }
  if (main.status !== "done" || plain.status !== "done") {
    return (
      <p class="verdict" role="status">
        Nothing to compare: an answer is incomplete.
      </p>
    );
  }
  const [one, other] = [main, plain].map((run) => new TextEncoder().encode(run.said)) as [Uint8Array, Uint8Array];
  const difference = differenceOf(one, other);
  if (difference === null) {
    return (
      <p class="verdict same" role="status">
        <Sign path="M4 10.5l4 4 8-9" /> <b>Identical.</b> {one.length} of {other.length} bytes, with speculation on and off.
      </p>
    );
  }
  return mustAgree ? (
    <p class="verdict different" role="status">
      <Sign path="M5 5l10 10M15 5L5 15" /> <b>Not identical:</b> they differ from byte {difference} on. Please report this.
    </p>
  ) : (
    <p class="verdict" role="status">
      <b>Two samples of one distribution.</b> They differ from byte {difference} on, as expected. For identical answers, set
      a seed or temperature 0 and use exact mode.
    </p>
  );
}

/** The first byte that differs, null when none does. */
function differenceOf(one: Uint8Array, other: Uint8Array): number | null {
  const shorter = Math.min(one.length, other.length);
  for (let index = 0; index < shorter; index++) if (one[index] !== other[index]) return index;
  return one.length === other.length ? null : shorter;
}

function Sign({ path }: { path: string }) {
  return (
    <svg class="sign" viewBox="0 0 20 20" width="20" height="20" aria-hidden="true">
      <path d={path} />
    </svg>
  );
}
