import type { Run } from "../run";

/** Whether speculation has changed anything: the two texts, byte by byte. */
export function Verdict({ main, plain, mustAgree }: { main: Run; plain: Run; mustAgree: boolean }) {
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
        Nothing to compare: not both have come to their end.
      </p>
    );
  }
  const [one, other] = [main, plain].map((run) => new TextEncoder().encode(run.text)) as [Uint8Array, Uint8Array];
  const parting = partingOf(one, other);
  if (parting === null) {
    return (
      <p class="verdict same" role="status">
        <Sign path="M4 10.5l4 4 8-9" /> <b>The same bytes.</b> {one.length} of {other.length}, with speculation on and off.
      </p>
    );
  }
  return mustAgree ? (
    <p class="verdict different" role="status">
      <Sign path="M5 5l10 10M15 5L5 15" /> <b>Not the same:</b> they part at byte {parting}. Please report this.
    </p>
  ) : (
    <p class="verdict" role="status">
      <b>Two draws of one law.</b> They part at byte {parting}, as they may: set a seed, or temperature 0, and leave the
      mode at exact for the same bytes.
    </p>
  );
}

/** The first byte that differs, null when none does. */
function partingOf(one: Uint8Array, other: Uint8Array): number | null {
  const shorter = Math.min(one.length, other.length);
  for (let place = 0; place < shorter; place++) if (one[place] !== other[place]) return place;
  return one.length === other.length ? null : shorter;
}

function Sign({ path }: { path: string }) {
  return (
    <svg class="sign" viewBox="0 0 20 20" width="20" height="20" aria-hidden="true">
      <path d={path} />
    </svg>
  );
}
