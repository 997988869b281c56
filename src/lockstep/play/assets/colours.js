// Colours: a hue for each worker, the same wherever it is shown; everything else is ink on paper.

/** An OKLCH colour as [red, green, blue], 0 to 255. */
function fromOklch(lightness, chroma, hue) {
  const a = chroma * Math.cos((hue * Math.PI) / 180);
  const b = chroma * Math.sin((hue * Math.PI) / 180);
  const l = (lightness + 0.3963377774 * a + 0.2158037573 * b) ** 3;
  const m = (lightness - 0.1055613458 * a - 0.0638541728 * b) ** 3;
  const s = (lightness - 0.0894841775 * a - 1.291485548 * b) ** 3;
  const linear = [
    4.0767416621 * l - 3.3077115913 * m + 0.2309699292 * s,
    -1.2684380046 * l + 2.6097574011 * m - 0.3413193965 * s,
    -0.0041960863 * l - 0.7034186147 * m + 1.707614701 * s,
  ];
  return linear.map((x) => {
    const held = Math.min(1, Math.max(0, x));
    return Math.round(255 * (held <= 0.0031308 ? 12.92 * held : 1.055 * held ** (1 / 2.4) - 0.055));
  });
}

const hex = (rgb) => `#${rgb.map((part) => part.toString(16).padStart(2, "0")).join("")}`;

/** Read anew when the system changes between light and dark. */
export function makeColours(isDark) {
  const worker = Array.from({ length: 16 }, (_, rank) => {
    const hue = 256 + 45 * (rank % 8) + (rank < 8 ? 0 : 22.5);
    // Yellows look muddy unless they are lighter than the rest.
    const yellow = 0.09 * Math.max(0, Math.cos(((hue - 85) * Math.PI) / 180)) ** 3;
    const lightness = (isDark ? 0.72 : 0.64) + yellow + (rank < 8 ? 0 : 0.06);
    return hex(fromOklch(lightness, 0.145, hue));
  });
  const ink = isDark
    ? { ink: "#eceef1", soft: "#a4abb6", faint: "#8a919d", line: "#2a2e36", fill: "#22262d", card: "#181b21", bad: "#ff8573", good: "#4cc38a" }
    : { ink: "#1a1d23", soft: "#5c626d", faint: "#6e7480", line: "#e4e4df", fill: "#eeeeea", card: "#ffffff", bad: "#c2331f", good: "#18794e" };
  return { ...ink, worker, isDark, server: ink.soft };
}

export const MONO = 'ui-monospace, "SF Mono", "JetBrains Mono", "Cascadia Mono", Menlo, Consolas, monospace';
export const SANS = 'Inter, ui-sans-serif, system-ui, -apple-system, "Segoe UI", Roboto, sans-serif';

const sizes = new WeakMap();

/** Keep the size of a canvas, and tell when it changes: asking for it in each frame would have the page laid out anew. */
export function watchSize(canvas, tell) {
  new ResizeObserver(([{ contentRect }]) => {
    sizes.set(canvas, [Math.round(contentRect.width), Math.round(contentRect.height)]);
    tell();
  }).observe(canvas);
}

/** Fit a canvas to its place on the page; returns its context, in CSS pixels, and its size. */
export function fitted(canvas) {
  const ratio = Math.min(2, globalThis.devicePixelRatio || 1);
  const [width, height] = sizes.get(canvas) ?? [canvas.clientWidth, canvas.clientHeight];
  if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
  }
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  return { context, width, height };
}
