"""How the page looks: one colour per kind of time everywhere, the same in light and dark as far as contrast allows.

The colours are those of Okabe and Ito (2008), which people with any kind of colour blindness can tell apart: cool ones
for work, warm ones for time that a better set-up would save. What is not a kind of time is drawn in ink.
"""

from lockstep.watching.run_record import KINDS

LIGHT = {
    "ground": "#f6f6f3", "card": "#ffffff", "ink": "#1b1d21", "soft": "#5a5f68", "faint": "#e3e3de", "line": "#3d4a5c",
    "band": "#c9d0da", "good": "#00664a", "bad": "#a83200", "held": "#8b9098",
    "data": "#e69f00", "copy": "#f0e442", "forward": "#56b4e9", "backward": "#0072b2", "exposed": "#d55e00",
    "waiting": "#cc79a7", "optimizer": "#009e73", "other": "#c6cad1", "hidden": "#f2bd98",
}  # fmt: skip
DARK = {
    "ground": "#121417", "card": "#1b1e23", "ink": "#eceef1", "soft": "#a3a9b3", "faint": "#31353c", "line": "#c3ccd9",
    "band": "#475163", "good": "#4fd1a5", "bad": "#ff9a62", "held": "#7d838c",
    "data": "#e69f00", "copy": "#e5da4c", "forward": "#56b4e9", "backward": "#1877b8", "exposed": "#e0691a",
    "waiting": "#d086b0", "optimizer": "#10a87d", "other": "#c6cad1", "hidden": "#b8713f",
}  # fmt: skip

_RULES = """
*{box-sizing:border-box}
html{-webkit-text-size-adjust:100%}
body{margin:0;background:var(--ground);color:var(--ink);
font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"Liberation Sans",sans-serif;
font-variant-numeric:tabular-nums;overflow-wrap:anywhere}
main,header,footer{max-width:1160px;margin:0 auto;padding:0 20px}
header{padding-top:36px}
h1{font-size:28px;line-height:1.2;margin:2px 0 4px;font-weight:650;letter-spacing:-.01em}
h2{font-size:19px;margin:44px 0 4px;font-weight:650}
h3{font-size:15px;margin:0;font-weight:600}
p{margin:0 0 12px;max-width:76ch}
small{font-size:12px;color:var(--soft)}
.over,.facts,.lead,.note,footer,figcaption p,caption{color:var(--soft)}
.over{font-size:13px;margin:0}
.facts{margin-bottom:20px}
.lead{margin-bottom:14px}
.verdict{background:var(--card);border:1px solid var(--faint);border-left:5px solid var(--bad);border-radius:8px;
padding:16px 20px;margin-bottom:14px}
.verdict.good{border-left-color:var(--good)}
.verdict b{display:block;font-size:20px;line-height:1.35;font-weight:650}
.verdict p{margin:6px 0 0}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(150px,1fr));margin:0;background:var(--card);
border:1px solid var(--faint);border-radius:8px;overflow:hidden}
.tiles div{box-shadow:0 0 0 1px var(--faint);padding:12px 16px}
.tiles dt{font-size:13px;color:var(--soft)}
.tiles dd{margin:0;font-size:23px;font-weight:600;line-height:1.3}
.tiles small{display:block;font-weight:400;line-height:1.35}
.card{background:var(--card);border:1px solid var(--faint);border-radius:8px;padding:16px 18px}
.grid{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,420px),1fr));gap:14px}
figure{margin:0}
figcaption{position:relative;padding-bottom:8px;min-height:52px}
.note,figcaption p{font-size:13px;margin:0}
figcaption .say{color:var(--ink);font-weight:600;font-size:14px}
.at{position:absolute;right:0;top:1px;font-size:13px;font-weight:600}
.plot{display:grid;grid-template:150px 22px/46px minmax(0,1fr) 54px;position:relative}
.ys,.field{position:relative}
.ys span{position:absolute;right:8px;transform:translateY(-50%);font-size:12px;color:var(--soft);white-space:nowrap;
line-height:1}
.field svg{position:absolute;inset:0;width:100%;height:100%;overflow:visible;display:block}
.field path{vector-effect:non-scaling-stroke;fill:none}
.field .grid{stroke:var(--faint);stroke-width:1}
.field .line{stroke:var(--line);stroke-width:1.6;stroke-linejoin:round}
.field .dots{stroke:var(--line);stroke-width:6;stroke-linecap:round}
.field .band{fill:var(--band);stroke:none}
.ref{position:absolute;left:0;right:0;border-top:1.5px dashed var(--soft)}
.ref span{position:absolute;right:6px;font-size:12px;color:var(--ink);background:var(--card);padding:0 4px;
line-height:1.4;white-space:nowrap;border-radius:3px}
.ref.over span{bottom:3px}
.ref.under span{top:3px}
.ends{position:relative}
.ends b{position:absolute;left:6px;transform:translateY(-50%);font-size:13px;white-space:nowrap;line-height:1}
.xs{grid-column:2;grid-row:2;position:relative;font-size:12px;color:var(--soft)}
.xs span{position:absolute;top:5px;transform:translateX(-50%);white-space:nowrap;line-height:1.2}
.xs .first{transform:none}
.xs .last{transform:translateX(-100%)}
.cross{position:absolute;top:0;bottom:0;width:1px;background:var(--ink);opacity:.5;pointer-events:none}
.scroll{overflow-x:auto;outline-offset:2px}
.timeline{display:block;width:100%;min-width:660px;font-size:12px}
.timeline text{fill:var(--ink)}
.timeline .tick{fill:var(--soft);font-size:11px}
.timeline .name{font-weight:600;paint-order:stroke;stroke:var(--card);stroke-width:3px}
.timeline .grid{stroke:var(--faint)}
.timeline .arrow{stroke:var(--ink);stroke-width:1;opacity:.75}
.timeline marker path{fill:var(--ink)}
.timeline rect[class^=k-]{stroke:var(--card);stroke-width:1}
.timeline [class^=in-]{fill:#111;font-size:11px;pointer-events:none}
.timeline .in-backward{fill:#fff}
.held{fill:var(--held)}
i.held{background:var(--held);height:4px!important}
.hint{display:none}
.pick{margin:0 0 10px}
select{font:inherit;color:inherit;background:var(--card);border:1px solid var(--soft);border-radius:6px;
padding:4px 8px;max-width:100%}
.legend{list-style:none;display:flex;flex-wrap:wrap;gap:4px 16px;margin:12px 0 0;padding:0;font-size:13px}
.legend i{display:inline-block;width:12px;height:12px;border-radius:2px;margin-right:6px;vertical-align:-1px}
.row{display:grid;grid-template-columns:132px minmax(0,1fr) 64px;gap:10px;align-items:center;margin:5px 0}
.who{font-weight:600;white-space:nowrap;overflow:hidden;text-overflow:ellipsis}
.who small{font-weight:400}
.sum{text-align:right;white-space:nowrap}
.bar{display:flex;height:24px;gap:1px;forced-color-adjust:none}
.bar span{overflow:hidden;white-space:nowrap;text-align:center;font-size:12px;line-height:24px;color:#111;
min-width:1px;flex:none;margin-right:-1px;border-right:1px solid var(--card)}
.bar .k-backward{color:#fff}
details{margin-top:12px}
summary{cursor:pointer;color:var(--soft);font-size:13px;width:fit-content;padding:4px 0}
table{border-collapse:collapse;font-size:13px;margin-top:6px}
caption{text-align:left;font-size:12px;padding-bottom:4px}
th,td{text-align:right;padding:4px 12px 4px 0;border-bottom:1px solid var(--faint);white-space:nowrap;font-weight:400}
thead th{color:var(--soft)}
th:first-child{text-align:left;font-weight:600}
thead th:first-child{font-weight:400}
.text td:last-child,.text th:last-child{text-align:left;white-space:normal;min-width:240px}
code,pre{font:12px/1.5 ui-monospace,SFMono-Regular,Menlo,"DejaVu Sans Mono",monospace}
pre{background:var(--ground);border:1px solid var(--faint);border-radius:6px;padding:12px;overflow-x:auto;
margin:8px 0;white-space:pre-wrap}
footer{font-size:13px;padding-top:36px;padding-bottom:44px}
@media(max-width:600px){main,header,footer{padding-left:14px;padding-right:14px}header{padding-top:20px}h1{
font-size:23px}.card{padding:14px 12px}
.verdict{padding:14px}.verdict b{font-size:18px}.row{grid-template-columns:minmax(0,1fr) auto;gap:2px 10px;
margin:9px 0}.bar{grid-row:2;grid-column:1/3}
.hint{display:block}.tiles{grid-template-columns:1fr 1fr}.tiles div{padding:10px 12px}.tiles dd{font-size:20px}
.plot{grid-template-columns:42px minmax(0,1fr) 48px}}
@media print{body{background:#fff}.card,.verdict{break-inside:avoid}}
"""

SCRIPT = """
"use strict";
for (const pick of document.querySelectorAll("#pick")) {
  pick.closest(".pick").hidden = false;
  const show = () => {
    for (const step of document.querySelectorAll(".step")) step.hidden = step.dataset.step !== pick.value;
  };
  pick.addEventListener("change", show);
  show();
}
const said = value => {
  const size = Math.abs(value);
  if (size >= 100) return Math.round(value).toLocaleString("en");
  return size === 0 || size >= 1e-4 ? String(+value.toPrecision(3)) : value.toExponential(1);
};
for (const field of document.querySelectorAll(".field")) {
  const [[first, last], ...points] = JSON.parse(field.dataset.points), cross = field.querySelector(".cross");
  const at = field.closest("figure").querySelector(".at");
  const span = last - first || 1;
  const isPart = field.dataset.percent !== undefined;
  field.addEventListener("pointermove", event => {
    const box = field.getBoundingClientRect(), step = first + span * (event.clientX - box.left) / box.width;
    let low = 0, high = points.length - 1;
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (points[middle][0] < step) low = middle; else high = middle;
    }
    const [x, y] = step - points[low][0] < points[high][0] - step ? points[low] : points[high];
    cross.hidden = false;
    cross.style.left = 100 * (x - first) / span + "%";
    at.textContent = "step " + x.toLocaleString("en") + ": " + (isPart ? said(100 * y) + " %" : said(y));
  });
  field.addEventListener("pointerleave", () => { cross.hidden = true; at.textContent = ""; });
}
"""
"""An enhancement: without it, one step and no values under the pointer are shown."""


def style() -> str:
    """The page's style sheet."""
    kinds = (*KINDS, "hidden")
    fills = "".join(f".k-{kind}{{fill:var(--{kind});background:var(--{kind})}}" for kind in kinds)
    return (
        f":root{{color-scheme:light dark;{_variables(LIGHT)}}}"
        f"@media(prefers-color-scheme:dark){{:root{{{_variables(DARK)}}}}}{_RULES}{fills}"
    )


def _variables(colours: dict[str, str]) -> str:
    return "".join(f"--{name}:{colour};" for name, colour in colours.items())
