"""What the charts of a page draw: a canvas does not tell, uPlot does."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from playwright.sync_api import Page

_RECORD = """(() => {
    let made = null;
    window.drawnCharts = [];
    Object.defineProperty(window, 'uPlot', {
        configurable: true,
        get: () => made,
        set: (uPlot) => {
            made = new Proxy(uPlot, {construct: (target, given) => {
                const chart = new target(...given);
                window.drawnCharts.push(chart);
                return chart;
            }});
        },
    });
})();"""
_READ = """(box) => {
    const inside = ({root}) => root.isConnected && box.contains(root);
    const chart = window.drawnCharts.filter(inside).at(-1);
    if (!chart) return null;
    const lines = chart.series.slice(1).map(({label, _dash, dash}, index) => (
        {label, dash: dash ?? _dash ?? [], values: Array.from(chart.data[index + 1])}));
    return {top: chart.scales.y.max, lines};
}"""


def record_charts(page: Page) -> None:
    """From the next navigation on, keep every chart that is made for :func:`drawn_chart`."""
    page.add_init_script(_RECORD)


def drawn_chart(page: Page, place: str) -> Any:
    """The chart in the element of a selector: the top of its scale, and its lines.

    A line has its label, dashes and values.
    """
    page.locator(f"{place} canvas").first.wait_for()
    return page.locator(place).first.evaluate(_READ)
