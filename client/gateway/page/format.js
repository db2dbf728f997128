// Formats numbers for people.

export const count = (n, one, many = `${one}s`) => `${n} ${n === 1 ? one : many}`;

/** 0.00084 s is "0.84 ms". */
export function duration(seconds) {
  if (seconds === null || seconds === undefined || !Number.isFinite(seconds)) return "–";
  if (seconds >= 100) return `${Math.round(seconds)} s`;
  if (seconds >= 1) return `${seconds.toFixed(1)} s`;
  return `${milliseconds(seconds)} ms`;
}

/** Milliseconds without their unit: two digits after the point below 10, one below 100. */
export function milliseconds(seconds) {
  const ms = seconds * 1e3;
  return ms.toFixed(ms < 10 ? 2 : ms < 100 ? 1 : 0);
}

/** 248,000 is "248k". */
export function compact(n) {
  if (n < 10_000) return String(n);
  return n < 10_000_000 ? `${Math.round(n / 1e3)}k` : `${Math.round(n / 1e6)}M`;
}

/** "0:11" is [0, 11]. */
export const span = (text) => text.split(":").map(Number);

export const clock = (date) => date.toLocaleTimeString([], { hour12: false });
