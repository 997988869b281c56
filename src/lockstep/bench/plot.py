"""The results of contests as a picture: a bar for each variant's ratio, with its interval; SVG, light and dark."""

import math
import statistics
from collections.abc import Iterator, Sequence
from html import escape

from lockstep.bench import catalogue
from lockstep.bench.results import ContestResults, VariantRow

WIDTH = 800
LEFT = 140
"""Room for the names."""
RIGHT = 184
"""Room for the numbers."""
ROW = 26
HEAD = 58
"""Of each contest: its name, and the scale."""
FOOT = 22

_STYLE = """
text{font:13px system-ui,-apple-system,"Segoe UI",Roboto,"Liberation Sans",sans-serif;fill:#1b1d21}
.ground{fill:#ffffff}.title{font-weight:600;font-size:15px}.soft{fill:#5a5f68;font-size:12px}
.grid{stroke:#e3e3de}.one{stroke:#5a5f68;stroke-dasharray:4 3}.span{stroke:#1b1d21;stroke-width:1.6}
.ours{fill:#0072b2}.peer{fill:#c98a00}.limit{fill:#8b9098}.cut{fill:#ffffff}
@media(prefers-color-scheme:dark){text{fill:#eceef1}.ground,.cut{fill:#1b1e23}.soft{fill:#a3a9b3}
.grid{stroke:#31353c}.one{stroke:#a3a9b3}.span{stroke:#eceef1}.ours{fill:#1877b8}.peer{fill:#a87400}}
""".strip()


def svg(contests: Sequence[ContestResults]) -> str:
    """One picture for all contests, one below the other; those in which nothing was compared are left out."""
    shown = [results for results in contests if results.bases]
    heights = [HEAD + ROW * len(results.rows) + FOOT for results in shown]
    height = sum(heights) + 16
    panels = "".join(
        f'<g transform="translate(0 {16 + sum(heights[:number])})">{"".join(_panel(results))}</g>'
        for number, results in enumerate(shown)
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        f'role="img"><title>{escape(_description(shown))}</title><style>{_STYLE}</style>'
        f'<rect class="ground" width="{WIDTH}" height="{height}"/>{panels}</svg>\n'
    )


def top_of(rows: Sequence[VariantRow], base: str) -> float:
    """Where the scale ends: a variant that takes far longer than most must not flatten the others."""
    medians = [row.ratios[base].median for row in rows]
    highest = max(row.ratios[base].high for row in rows)
    return max(1.1, min(1.05 * highest, 2 * statistics.median(medians)))


def ticks(top: float) -> list[float]:
    """Round values from 0 to `top`, five to ten of them."""
    power = 10.0 ** math.floor(math.log10(top / 10))
    step = next(power * factor for factor in (1, 2, 5, 10) if top / (power * factor) <= 10)
    return [round(number * step, 10) for number in range(int(top / step + 1e-9) + 1)]


def _panel(results: ContestResults) -> Iterator[str]:
    base, contest = results.bases[0], results.contest
    top = top_of(results.rows, base)
    bottom = HEAD + ROW * len(results.rows)
    where = f"{contest.workers} worker(s), {'GPU' if contest.device == 'cuda' else 'CPU'}"
    yield f'<text class="title" x="16" y="18">{escape(contest.workload)}: time of a step, {base} = 1</text>'
    yield f'<text class="soft" x="16" y="36">{escape(where)}; medians and 95 % intervals; shorter is faster</text>'
    for tick in ticks(top):
        x = _place(tick, top)
        yield f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{HEAD - 8}" y2="{bottom}"/>'
        yield f'<text class="soft" x="{x:.1f}" y="{bottom + 15}" text-anchor="middle">{tick:g}</text>'
    for number, row in enumerate(results.rows):
        yield from _bar(row, base, HEAD + ROW * number, top)
    one = _place(1, top)
    yield f'<line class="one" x1="{one:.1f}" x2="{one:.1f}" y1="{HEAD - 8}" y2="{bottom}"/>'


def _bar(row: VariantRow, base: str, y: int, top: float) -> Iterator[str]:
    ratio, middle = row.ratios[base], y + ROW / 2 - 4
    end = _place(min(ratio.median, top), top)
    yield f'<text x="{LEFT - 8}" y="{middle + 4.5}" text-anchor="end">{escape(row.variant)}</text>'
    yield f'<rect class="{_kind(row.variant)}" x="{LEFT}" y="{y}" width="{end - LEFT:.1f}" height="{ROW - 8}" rx="2"/>'
    if ratio.median > top:  # The bar goes on beyond the scale, as the gap in it says.
        yield f'<path class="cut" d="M{end - 16:.1f} {y + ROW - 8}l6 {8 - ROW}h5l-6 {ROW - 8}z"/>'
    else:
        low, high = _place(ratio.low, top), _place(min(ratio.high, top), top)
        ends = f"M{low:.1f} {middle - 4}v8M{high:.1f} {middle - 4}v8"
        yield f'<path class="span" d="M{low:.1f} {middle}H{high:.1f}{ends}"/>'
    text = "1" if row.variant == base else str(ratio)
    yield f'<text x="{WIDTH - RIGHT + 8}" y="{middle + 4.5}">{text}</text>'


def _place(value: float, top: float) -> float:
    return LEFT + (WIDTH - LEFT - RIGHT) * value / top


def _kind(variant: str) -> str:
    if catalogue.spelled(variant).kind in catalogue.LIMITS:
        return "limit"
    return "ours" if catalogue.is_ours(variant) else "peer"


def _description(contests: Sequence[ContestResults]) -> str:
    """The picture in words, for those who do not see it."""
    said = []
    for results in contests:
        base = results.bases[0]
        ratios = ", ".join(f"{row.variant} {row.ratios[base].median:.3f}" for row in results.rows)
        said.append(f"{results.contest.workload}, time of a step in units of {base}: {ratios}")
    return ". ".join(said) or "Nothing was measured"
