// How the speculation goes, round by round, as it goes.

import type { ComponentChildren } from "preact";
import type { Run } from "../run";
import type { Origin, Round } from "../wire";
import { Line } from "./line";

/** As many rounds as fit, on a wide screen and on a narrow one; the newest. */
const NUM_ROUNDS = { wide: 48, narrow: 24 };
const WIDE = "(min-width: 44rem)";
/** Rounds that a point of the two lengths is the mean of. */
const SMOOTHING = 8;

export function Charts({ main, plain }: { main: Run | null; plain: Run | null }) {
  const rounds = main?.drafted ?? [];
  return (
    <section class="charts" aria-label="Speculation">
      <RoundChart run={main} />
      <Figure name="Acceptance length" unit="tokens a round" value={main?.acceptanceLength ?? null} digits={2}>
        <Line lines={[smoothed(rounds, (round) => 1 + round.num_accepted_tokens)]} floor={0} />
      </Figure>
      <Figure name="Draft length" unit="tokens asked" value={main?.draftLength ?? null} digits={2}>
        <Line lines={[smoothed(rounds, (round) => round.num_draft_tokens)]} floor={0} />
      </Figure>
      <Figure
        name="Speed"
        unit={plain === null ? "tokens a second" : "tokens a second; dashed: off"}
        value={main?.tokensPerS ?? null}
        digits={0}
      >
        <Line lines={[ratesOf(main), ratesOf(plain)]} floor={0} />
      </Figure>
    </section>
  );
}

interface FigureProps {
  name: string;
  unit: string;
  value: number | null;
  digits: number;
  children: ComponentChildren;
}

function Figure({ name, unit, value, digits, children }: FigureProps) {
  return (
    <figure class="card">
      <figcaption>
        <h2>{name}</h2>
        <p>
          <b>{value === null ? "–" : value.toFixed(digits)}</b> <span class="quiet">{unit}</span>
        </p>
      </figcaption>
      {children}
    </figure>
  );
}

function smoothed(rounds: Round[], valueOf: (round: Round) => number): [number, number][] {
  return rounds.map((_, place) => {
    const recent = rounds.slice(Math.max(0, place + 1 - SMOOTHING), place + 1);
    return [place, recent.reduce((sum, round) => sum + valueOf(round), 0) / recent.length];
  });
}

function ratesOf(run: Run | null): [number, number][] {
  return run === null ? [] : run.rates.map(({ atS, perS }) => [atS, perS]);
}

const CELL = 10;
const GAP = 2;
const ROWS = 6;

/** One column a round: what was drafted, how far it was good, and the token that the target put on top. */
function RoundChart({ run }: { run: Run | null }) {
  const numRounds = matchMedia(WIDE).matches ? NUM_ROUNDS.wide : NUM_ROUNDS.narrow;
  const segments = run?.segments.slice(-numRounds) ?? [];
  const rows = Math.max(ROWS, ...segments.map((segment) => segment.round.num_draft_tokens + 1));
  const height = rows * CELL;
  return (
    <figure class="card rounds">
      <figcaption>
        <h2>Rounds</h2>
        <p class="quiet">
          {segments.length === 0 ? "a column for each, as they come" : `the last ${segments.length}; hollow: drafted and dropped`}
        </p>
      </figcaption>
      <svg viewBox={`0 0 ${numRounds * CELL} ${height}`} role="img" aria-label={summaryOf(run)}>
        {segments.map(({ round, tokens }, place) => {
          const top = tokens.at(-1)?.origin ?? "target";
          return <Column key={round.index} x={place * CELL} bottom={height} round={round} top={top} />;
        })}
      </svg>
    </figure>
  );
}

function Column({ x, bottom, round, top }: { x: number; bottom: number; round: Round; top: Origin }) {
  const cells = [];
  const numShown = Math.max(round.num_draft_tokens, round.num_accepted_tokens);
  for (let place = 0; place < numShown; place++) {
    const isAccepted = place < round.num_accepted_tokens;
    // The target's own token stands where the first wrong one was.
    if (place === round.num_accepted_tokens && top === "corrected") continue;
    cells.push(<Cell key={place} kind={isAccepted ? "accepted" : "dropped"} x={x} y={bottom - (place + 1) * CELL} />);
  }
  const isOwn = top !== "accepted";
  if (isOwn) cells.push(<Cell key="own" kind={top} x={x} y={bottom - (round.num_accepted_tokens + 1) * CELL} />);
  return <g>{cells}</g>;
}

/** Each kind has a shape of its own, so that none needs its colour. */
function Cell({ kind, x, y }: { kind: Origin | "dropped"; x: number; y: number }) {
  const side = CELL - GAP;
  switch (kind) {
    case "bonus":
      return <circle class={kind} cx={x + side / 2} cy={y + GAP / 2 + side / 2} r={side / 2} />;
    case "corrected":
      return <path class={kind} d={`M${x} ${y + GAP / 2}l${side} ${side}m0 ${-side}l${-side} ${side}`} />;
    case "target":
      return <rect class={kind} x={x} y={y + side - 2} width={side} height="3" />;
    default:
      return <rect class={kind} x={x + 0.5} y={y + GAP / 2 + 0.5} width={side - 1} height={side - 1} rx="1.5" />;
  }
}

function summaryOf(run: Run | null): string {
  if (run === null || run.segments.length === 0) return "No rounds yet";
  const drafted = run.drafted;
  const numAccepted = drafted.reduce((sum, round) => sum + round.num_accepted_tokens, 0);
  const numDrafted = drafted.reduce((sum, round) => sum + round.num_draft_tokens, 0);
  return `${run.segments.length} rounds, ${drafted.length} with a draft; ${numAccepted} of ${numDrafted} draft tokens accepted`;
}
