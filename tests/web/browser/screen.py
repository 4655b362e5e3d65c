"""What is wrong with the look of a page, as the browser has laid it out and coloured it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import pytest

from tests.kit.servers.browser import PHONE, keep_shot

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page

WIDE = (1440, 900)
Scheme = Literal["light", "dark"]
SCHEMES: tuple[Scheme, ...] = ("light", "dark")
WIDE_LIGHT: dict[str, Any] = {"size": WIDE, "color_scheme": "light"}
PHONE_DARK: dict[str, Any] = {"size": PHONE, "color_scheme": "dark", "has_touch": True}
FORMS = (pytest.param(WIDE_LIGHT, id="1440-light"), pytest.param(PHONE_DARK, id="390-dark"))
"""How a page is opened in tests of what a person does; how it looks is tested in every form."""
_FAULTS = """async dark => {
    // Charts are drawn again before the next frame.
    await new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)));
    const found = [];
    const parts = text => text.match(/[\\d.]+/g).map(Number);
    // A colour over another one; as the browser tells them, with or without an alpha.
    const over = ([r, g, b, alpha = 1], below) =>
        [r, g, b].map((value, index) => value * alpha + below[index] * (1 - alpha));
    const light = colour => colour
        .map(value => value / 255)
        .map(value => value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4)
        .reduce((sum, value, index) => sum + value * [0.2126, 0.7152, 0.0722][index], 0);
    const contrast = (one, other) => {
        const [least, most] = [light(one), light(other)].sort((a, b) => a - b);
        return (most + 0.05) / (least + 0.05);
    };
    const behind = element => {
        if (!element) return [255, 255, 255];
        const colour = parts(getComputedStyle(element).backgroundColor);
        return over(colour, colour[3] === undefined ? colour : behind(element.parentElement));
    };

    const root = document.documentElement;
    if (root.scrollWidth > innerWidth) found.push(`${root.scrollWidth} pixels wide`);
    if ((light(behind(document.body)) < 0.5) !== dark) found.push('not in the scheme');

    // The texts at the axes of a chart have that colour.
    const sample = document.body.appendChild(document.createElement('i'));
    sample.style.color = 'var(--soft)';
    const soft = parts(getComputedStyle(sample).color);
    sample.remove();
    for (const chart of document.querySelectorAll('.chart')) {
        const canvas = chart.querySelector('canvas');
        const name = chart.getAttribute('aria-label');
        if (!canvas) {
            found.push(`no chart: ${name}`);
            continue;
        }
        const copy = document.createElement('canvas');
        [copy.width, copy.height] = [canvas.width, canvas.height];
        const context = copy.getContext('2d', { willReadFrequently: true });
        context.drawImage(canvas, 0, 0);
        const { data } = context.getImageData(0, 0, copy.width, copy.height);
        let drawn = false;
        for (let at = 0; at < data.length && !drawn; at += 4)
            drawn = data[at + 3] > 128 &&
                soft.every((value, index) => Math.abs(data[at + index] - value) < 10);
        if (!drawn) found.push(`not drawn in the scheme: ${name}`);
    }

    const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
    while (texts.nextNode()) {
        const text = texts.currentNode.data.trim();
        const element = texts.currentNode.parentElement;
        const seen = {opacityProperty: true, visibilityProperty: true};
        if (!text || !element.checkVisibility(seen)) continue;
        if (element.closest('.hidden, .skip, :disabled, option, noscript, script')) continue;
        const style = getComputedStyle(element);
        const drawing = element.closest('svg');
        const scale = drawing ? element.getScreenCTM().a : 1;
        const size = scale * parseFloat(style.fontSize);
        // The map is zoomed.
        if (size < 10.5 && !element.closest('.map')) found.push(`${size.toFixed(1)} px: ${text}`);
        const back = behind(element);
        const ratio = contrast(over(parts(drawing ? style.fill : style.color), back), back);
        if (ratio < 4.5) found.push(`contrast ${ratio.toFixed(1)}: ${text}`);
    }

    for (const cell of document.querySelectorAll('td, th, dd'))
        if (!cell.closest('.scroll') && cell.scrollWidth > cell.clientWidth + 1)
            found.push(`wider than its cell: ${cell.innerText}`);

    // Names may be broken anywhere; times are not.
    for (const { firstChild } of document.querySelectorAll('.values tbody th')) {
        for (const { 0: word, index } of firstChild?.data?.matchAll(/\\S+/g) ?? []) {
            const range = document.createRange();
            range.setStart(firstChild, index);
            range.setEnd(firstChild, index + word.length);
            if (range.getClientRects().length > 1) found.push(`in two lines: ${word}`);
        }
    }

    let last = null;
    for (const link of document.querySelectorAll('.nav a')) {
        const range = document.createRange();
        range.selectNodeContents(link);
        const box = range.getBoundingClientRect();
        if (last !== null && box.left - last < 4) found.push(`too close: ${link.textContent}`);
        last = box.right;
    }
    return found;
}"""


def faults(page: Page, scheme: Scheme) -> list[str]:
    """What is too wide, of another scheme, too small, too faint or too close to its neighbour."""
    problems: list[str] = page.evaluate(_FAULTS, scheme == "dark")
    return problems


def in_every_form(page: Page, name: str, *shown: Locator) -> None:
    """Check that these are shown, and nothing is wrong, on a desk and on a phone, light and dark.

    The page stays as it is: its charts are drawn again. Leaves it light, in the size that it had.
    """
    from playwright.sync_api import expect

    wrong: list[str] = []
    before = page.viewport_size
    for width, height in (WIDE, PHONE):
        page.set_viewport_size({"width": width, "height": height})
        for scheme in SCHEMES:
            page.emulate_media(color_scheme=scheme)
            for locator in shown:
                expect(locator).to_be_visible()
            wrong += [f"{width}, {scheme}: {fault}" for fault in faults(page, scheme)]
            keep_shot(page, f"{name}-{width}-{scheme}")
    page.emulate_media(color_scheme="light")
    if before is not None:
        page.set_viewport_size(before)
    assert not wrong, "\n".join([name, *wrong])
