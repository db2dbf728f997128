// Routes as lines over the peers' lanes. Geometry only.

import { span } from "./words.js";

const BEND = 7;

/** An SVG path. `lanes`: peer id -> {left, width, middle} in pixels; a hop without a lane interrupts the line. */
export function line(hops, lanes, layers, aside = 0) {
  const parts = [];
  let at = null;
  for (const hop of hops) {
    const lane = lanes.get(hop.peer_id);
    if (!lane) {
      at = null;
      continue;
    }
    const [first, last] = span(hop.span);
    const x0 = lane.left + (first / layers) * lane.width + aside;
    const x1 = lane.left + (last / layers) * lane.width + aside;
    const y = lane.middle + aside;
    parts.push(at ? step(at, x0, y) : `M${x0 + BEND} ${y}`);
    parts.push(`H${x1 - BEND}`);
    at = { x: x1, y };
  }
  return parts.map((part) => part.replace(/-?\d+\.\d+/g, (number) => Number(number).toFixed(1))).join("");
}

/** Round the corner, down or up to the next lane, round the corner. */
function step({ x, y }, x1, y1) {
  const bend = y1 > y ? BEND : -BEND;
  return `Q${x} ${y} ${x} ${y + bend}V${y1 - bend}Q${x1} ${y1} ${x1 + BEND} ${y1}`;
}
