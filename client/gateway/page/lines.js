// Draws routes as lines over the peers' lanes. Geometry only.

import { span } from "./format.js";

const BEND = 7;

/** An SVG path, shifted by `offset`. `lanes`: peer id -> {left, width, middle}, all in pixels. A hop without a lane
    interrupts the line. */
export function line(hops, lanes, layers, offset) {
  const parts = [];
  let end = null;
  for (const hop of hops) {
    const lane = lanes.get(hop.peer_id);
    if (!lane) {
      end = null;
      continue;
    }
    const [first, last] = span(hop.span);
    const x0 = lane.left + (first / layers) * lane.width + offset;
    const x1 = lane.left + (last / layers) * lane.width + offset;
    const y = lane.middle + offset;
    parts.push(end ? corners(end, x0, y) : `M${x0 + BEND} ${y}`);
    parts.push(`H${x1 - BEND}`);
    end = { x: x1, y };
  }
  return parts.map((part) => part.replace(/-?\d+\.\d+/g, (number) => Number(number).toFixed(1))).join("");
}

/** From the end of one lane to the start of another, with two rounded corners. */
function corners({ x, y }, x1, y1) {
  const bend = y1 > y ? BEND : -BEND;
  return `Q${x} ${y} ${x} ${y + bend}V${y1 - bend}Q${x1} ${y1} ${x1 + BEND} ${y1}`;
}
