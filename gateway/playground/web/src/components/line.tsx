const WIDTH = 160;
const HEIGHT = 44;
const PAD = 3;

/** Lines on a common scale; the second is dashed. Decorative: the figure's caption has the value as text. */
export function Line({ lines, floor }: { lines: [number, number][][]; floor: number }) {
  const points = lines.flat();
  const lastX = Math.max(1e-9, ...points.map(([x]) => x));
  const most = Math.max(floor + 1e-9, ...points.map(([, y]) => y));
  const pathOf = (line: [number, number][]) =>
    line
      .map(([x, y], index) => {
        const left = PAD + (x / lastX) * (WIDTH - 2 * PAD);
        const top = HEIGHT - PAD - ((y - floor) / (most - floor)) * (HEIGHT - 2 * PAD);
        return `${index === 0 ? "M" : "L"}${left.toFixed(1)} ${top.toFixed(1)}`;
      })
      .join("");
  return (
    <svg class="line" viewBox={`0 0 ${WIDTH} ${HEIGHT}`} preserveAspectRatio="none" aria-hidden="true">
      <path class="ground" d={`M0 ${HEIGHT - 0.5}H${WIDTH}`} />
      {lines.map((line, index) => (
        <path key={index} class={index === 0 ? "first" : "second"} d={pathOf(line)} />
      ))}
    </svg>
  );
}
