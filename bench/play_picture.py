"""Make the picture of the playground that moves, and its still pictures, in a headless Chromium.

    python bench/play_picture.py docs/          # play.gif, play-*.png; needs Chromium and Pillow

The page's clock is turned by hand, a frame at a time, so the same page gives the same pictures on any machine.
"""

import argparse
import base64
import io
import itertools
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from PIL import Image

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from report_browser import Browser

from lockstep.play.page import page

FRAMES_PER_S = 10
WIDTH = 600
COLOURS = 96

STILLS = {
    # The address, phases to go on, seconds into the last one, what to do, width, height, dark, share of the size.
    "play-desktop": ("#lesson=3&workers=8&steps=60&reduction=tree", 4, 0.8, "", 1280, 800, False, 0.75),
    "play-dark": ("#lesson=1&workers=8&steps=60&reduction=ring", 8, 0.2, "", 1280, 800, True, 0.75),
    "play-phone": ("#workers=5&steps=60&reduction=ring", 6, 0.25, "scrollTo(0, 190)", 390, 844, False, 1.0),
    "play-phone-dark": (
        "#lesson=9&workers=4&steps=12&reduction=tree&events=12-2",
        0,
        0,
        "scrollTo(0, 508)",
        390,
        844,
        True,
        1.0,
    ),
}


def main() -> None:
    """Write everything."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    with tempfile.TemporaryDirectory() as place:
        path = Path(place) / "play.html"
        path.write_text(page(), encoding="utf-8")
        browser = Browser(Path(place) / "profile", deadline=900)
        try:
            for name, still in STILLS.items():
                take_still(browser, path, folder / f"{name}.png", *still)
            frames = film(browser, path)
        finally:
            browser.close()
    write_gif(frames, folder / "play.gif")
    for name in [*(f"{name}.png" for name in STILLS), "play.gif"]:
        print(f"{folder / name}: {(folder / name).stat().st_size / 1000:.0f} KB")


def take_still(browser, path, target, address, phases, seconds, then, width, height, dark, share) -> None:
    """One picture of a state of the page."""
    show(browser, path, address, width, height, dark=dark)
    for _ in range(phases):
        browser.value("playground.actions['phase-on']()")
    if seconds:
        browser.value(f"playground.player.advance({seconds})")
    if then:
        browser.value(then)
    settle(browser)
    image = shot(browser)
    if share != 1.0:
        image = image.resize((round(image.width * share), round(image.height * share)), Image.Resampling.LANCZOS)
    image.quantize(256, method=Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE).save(target, optimize=True)


def film(browser, path) -> list:
    """A step around the ring, the change to the tree, and a step along it."""
    show(browser, path, "#workers=4&steps=40&reduction=ring", WIDTH + 24, 1000)
    browser.value(
        "document.getElementById('scene').style.flex = 'none'; document.getElementById('scene').style.height = '350px'"
    )
    settle(browser)
    box = browser.value(
        "(() => { const a = document.querySelector('#stage').getBoundingClientRect();"
        " const b = document.querySelector('.transport').getBoundingClientRect();"
        " return [a.left + 2, a.top + scrollY + 2, a.width - 4, b.top - a.top - 10]; })()"
    )
    frames = []

    def take(seconds, speed=1.0):
        for _ in range(round(seconds * FRAMES_PER_S)):
            browser.value(f"playground.player.advance({speed / FRAMES_PER_S}), playground.page.hasChanged = true")
            browser.value("playground.wake()")
            settle(browser)
            frames.append(shot(browser, box))

    def whole_step(speed):
        browser.value("playground.player.rest(), playground.player.advance(1e-6)")
        seconds = browser.value("playground.player.phases.reduce((sum, { seconds }) => sum + seconds, 0)")
        take((seconds - 0.05) / speed, speed)

    whole_step(1.7)
    browser.value("playground.player.rest(), playground.set({ reduction: 'tree' }, { to: 41 })")
    settle(browser)
    whole_step(1.5)
    return frames


def show(browser, path, address, width, height, *, dark=False) -> None:
    """Load a state, standing still."""
    browser.show(path, width, height, dark=dark)
    browser.value(f"location.hash = {address!r}")
    time.sleep(0.1)
    settle(browser)
    browser.value("playground.page.isPlaying = false")
    deadline = time.monotonic() + 60
    while "computed when" in browser.value("document.getElementById('alone').textContent"):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def settle(browser) -> None:
    """Until what is drawn is what is computed."""
    browser.value(
        """(async () => {
          const { page, player } = playground;
          const frame = () => new Promise((next) => setTimeout(() => requestAnimationFrame(next), 0));
          await frame();
          while (player.isBehind || page.hasChanged) await frame();
          for (let k = 0; k < 2; k++) await frame();
        })()"""
    )


def shot(browser, box=None):
    """What is on the screen, or a part of the page."""
    options = {}
    if box:
        options["clip"] = {"x": box[0], "y": box[1], "width": box[2], "height": box[3], "scale": 1}
    data = browser.ask("Page.captureScreenshot", format="png", **options)["data"]
    return Image.open(io.BytesIO(base64.b64decode(data))).convert("RGB")


def write_gif(frames, target) -> None:
    """One palette for all frames, and only what has changed since the frame before, so that it stays small."""
    sheet = Image.new("RGB", (frames[0].width, frames[0].height * len(frames[::4])), "white")
    for k, frame in enumerate(frames[::4]):
        sheet.paste(frame, (0, k * frame.height))
    palette = sheet.quantize(COLOURS, method=Image.Quantize.MAXCOVERAGE, kmeans=1)
    indices = [np.asarray(frame.quantize(palette=palette, dither=Image.Dither.NONE)) for frame in frames]
    changes = [indices[0]]
    changes += [np.where(now == before, COLOURS, now).astype(np.uint8) for before, now in itertools.pairwise(indices)]
    flat = []
    for change in changes:
        image = Image.fromarray(change, mode="P")
        image.putpalette([*palette.getpalette()[: 3 * COLOURS], 255, 255, 255])
        flat.append(image)
    flat[0].save(
        target, save_all=True, append_images=flat[1:], duration=1000 / FRAMES_PER_S, loop=0,
        transparency=COLOURS, disposal=1, optimize=False,
    )  # fmt: skip


if __name__ == "__main__":
    main()
