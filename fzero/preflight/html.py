"""A prediction as one HTML page that needs nothing else: no script, no font, no network."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from fzero.preflight.result import Preflight, describe_plan
from fzero.preflight.tables import duration, merged, size


_WIDTH = 960
_ROW = 26
_LABEL = 120
# Okabe and Ito's colours (and Tol's wine), which people with any colour vision can tell apart.
_COLOURS = {
    "params": "#0072B2", "compute": "#56B4E9", "opt_state": "#009E73", "buffers": "#999999",
    "ema": "#117733", "grads": "#CC79A7", "batch": "#F0E442", "saved activations": "#E69F00",
    "secondary shards": "#882255",
    "gradients": "#CC79A7", "temporaries": "#D55E00", "reserve": "#555555", "free": "#eeeeee",
}  # fmt: skip
_ACTIONS = {"F": "#56B4E9", "B": "#009E73", "I": "#009E73", "W": "#E69F00"}
_WORDS = {"F": "forward", "B": "backward", "I": "input gradient", "W": "weight gradient"}
_STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; color: #1c1c1c; margin: 2rem auto; max-width: 62rem;
       padding: 0 1rem; }
h1 { font-size: 1.4rem; margin-bottom: 0; } h2 { font-size: 1.1rem; margin-top: 2rem; }
.fits { color: #00664b; font-weight: 600; } .not { color: #b03a00; font-weight: 600; }
table { border-collapse: collapse; width: 100%; } caption { text-align: left; color: #555; }
th, td { padding: .25rem .6rem; text-align: right; border-bottom: 1px solid #ddd; }
th { background: #f6f6f6; } td.word, th.word { text-align: left; }
tr.open td { background: #fff0e8; }
svg { display: block; max-width: 100%; height: auto; }
svg text { font: 12px system-ui, sans-serif; }
.key span { display: inline-block; margin-right: 1.2rem; white-space: nowrap; }
.key i { display: inline-block; width: .8em; height: .8em; margin-right: .35em; }
p.note { color: #555; }
"""


def page(found: Preflight, title: str = "") -> str:
    """The whole page.

    Args:
        found: the prediction.
        title: what it is about; the plan by default.

    Returns:
        HTML that refers to nothing outside itself.
    """
    heading = escape(title or f"{describe_plan(found)} on {found.topology}")
    parts = [
        f"<h1>{heading}</h1><p>{escape(describe_plan(found))} on {found.topology};"
        f" {found.num_elements:,} parameters</p>",
        _verdict(found),
        "<h2>Memory per device</h2>",
        _memory(found),
        "<h2>Time of a step</h2>",
        _times(found),
        "<h2>Timeline</h2>",
        _pipeline(found) if found.pipeline is not None else _step(found),
        "<h2>Collectives per device and step</h2>",
        _collectives(found),
        *(f'<p class="note">{escape(note)}</p>' for note in found.notes),
        f'<p class="note">Compiled in {found.compile_seconds:.1f} s for {found.topology}. Rates:'
        f" {escape(found.rates.source)}.</p>",
    ]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width">'
        f"<title>{heading}</title><style>{_STYLE}</style></head>\n<body>\n"
        + "\n".join(parts)
        + "\n</body></html>\n"
    )


def _verdict(found: Preflight) -> str:
    fits, memory = found.fits, found.rates.memory_bytes
    words = "fits" if fits else "does not fit"
    spare = f"{size(abs(found.spare_bytes))} {'to spare' if fits else 'too much'}"
    fraction = found.memory_fraction_needed
    hint = "" if fraction is None else f"; set XLA_PYTHON_CLIENT_MEM_FRACTION={fraction:.2f}"
    return (
        f'<p class="{"fits" if fits else "not"}">{words}: peak {size(found.memory.peak)} of'
        f" {size(memory)}, {spare}{hint}</p>"
    )


def _memory(found: Preflight) -> str:
    """One bar of everything that is held, and the table of its parts."""
    memory = found.memory
    parts = [(name.removeprefix("state: "), count) for name, count in memory.parts()]
    shown = [*parts, ("reserve", found.rates.reserve_bytes)]
    whole = max(found.rates.memory_bytes, sum(count for _, count in shown))
    shown.append(("free", max(0, whole - sum(count for _, count in shown))))
    limit = _WIDTH * found.rates.memory_bytes / whole
    bars = [
        *_bar(parts, 14),
        _text(0, 10, "what a step holds"),
        *_bar(shown, 68),
        _text(0, 64, "of the device"),
        f'<line x1="{limit:.1f}" y1="64" x2="{limit:.1f}" y2="106" stroke="#b03a00"/>',
    ]
    rows = [[name, f"{count:,}", size(count)] for name, count in parts]
    rows.append(["peak", f"{memory.peak:,}", size(memory.peak)])
    return (
        _svg(108, "memory per device", bars)
        + _key((name, _COLOURS[name]) for name, _ in shown)
        + _table(["what", "bytes", ""], rows)
    )


def _bar(parts: Sequence[tuple[str, int]], y: float) -> list[str]:
    """Parts side by side over the whole width."""
    whole = max(1, sum(count for _, count in parts))
    bars, x = [], 0.0
    for name, count in parts:
        width = _WIDTH * count / whole
        bars.append(_rect(x, y, width, 34, _COLOURS[name], f"{name}: {size(count)}"))
        x += width
    return bars


def _times(found: Preflight) -> str:
    b = found.bounds
    again = f"{found.compiled_flops / 1e12:.2f} TFLOP, {found.recomputed_fraction:.0%} recomputed"
    rows = [
        [f"matmuls at the peak ({again})", duration(b.compute_seconds), ""],
        ["device memory at its peak", duration(b.memory_seconds), ""],
        ["links at their peak", duration(b.link_seconds), ""],
        [f"at best ({b.limit} is the most)", duration(b.best_seconds), f"{b.best_mfu:.1%}"],
        ["likely", duration(b.likely_seconds), f"{b.likely_mfu:.1%}"],
        ["nothing beside collectives", duration(b.serial_seconds), f"{b.serial_mfu:.1%}"],
    ]
    return _table(["what", "seconds", "MFU"], rows)


def _step(found: Preflight) -> str:
    """Two lanes: what computes, and what communicates beside it or alone."""
    b, sums = found.bounds, found.traffic
    adds, hidden = sums.exposed_seconds, sums.seconds / found.rates.link_share
    hidden -= adds
    scale = (_WIDTH - _LABEL) / max(b.likely_seconds, adds + hidden, 1e-12)
    kernels = max(0.0, b.likely_seconds - adds)
    shapes = [
        _text(0, 20, "kernels"),
        _rect(_LABEL, 4, scale * kernels, 22, "#0072B2", f"kernels: {duration(kernels)}"),
        _text(0, 20 + _ROW, "collectives"),
        _rect(_LABEL, 4 + _ROW, scale * hidden, 22, "#009E73", f"hidden: {duration(hidden)}"),
        _rect(
            _LABEL + scale * kernels, 4 + _ROW, scale * adds, 22, "#D55E00",
            f"in the open: {duration(adds)}",
        ),
    ]  # fmt: skip
    keys = [("kernels", "#0072B2"), ("hidden", "#009E73"), ("in the open", "#D55E00")]
    return (
        _svg(2 * _ROW + 6, "likely time of a step", shapes)
        + _key(keys)
        + f'<p class="note">{duration(b.likely_seconds)}: sums, not the order of things.</p>'
    )


def _pipeline(found: Preflight) -> str:
    """A lane per rank, every action at its simulated time."""
    own = found.pipeline
    assert own is not None
    ranks = len(own.peak_live_per_rank)
    scale = (_WIDTH - _LABEL) / max(own.makespan_seconds, 1e-12)
    shapes = [
        _text(0, 20 + rank * _ROW, f"rank {rank}: {size(own.peak_bytes_per_rank[rank])}")
        for rank in range(ranks)
    ]
    shapes += [
        _rect(
            _LABEL + scale * start, 4 + rank * _ROW, scale * (end - start), 22, _ACTIONS[kind],
            f"{_WORDS[kind]} of microbatch {microbatch} on stage {stage}: {duration(end - start)}",
            edge=True,
        )
        for rank, kind, stage, microbatch, start, end in own.events
    ]  # fmt: skip
    kinds = dict.fromkeys(event[1] for event in own.events)
    return (
        _svg(ranks * _ROW + 6, "simulated pipeline", shapes)
        + _key((_WORDS[kind], _ACTIONS[kind]) for kind in kinds)
        + f'<p class="note">{escape(own.schedule)}: {duration(own.makespan_seconds)},'
        f" {own.bubble_fraction:.1%} idle (simulated)</p>"
    )


def _collectives(found: Preflight) -> str:
    rows, opened = [], []
    for c in sorted(merged(found.collectives), key=lambda c: -c.total_bytes):
        rows.append(
            [
                c.kind + ("*" if c.estimated else ""), c.axes,
                "across hosts" if c.crosses_hosts else "in a host", size(c.bytes), str(c.times),
                size(c.total_bytes), str(c.num_matmuls), str(c.num_kernels),
                duration(c.times * c.exposed_seconds),
            ]
        )  # fmt: skip
        opened.append(not c.num_matmuls)
    sums = found.traffic
    words = (
        f"{size(sums.communicated_bytes)} sent: {size(sums.exposed_bytes)} with no kernel between"
        f" start and done, {size(sums.without_matmul_bytes)} with no matmul (shaded);"
        f" {size(sums.cross_host_bytes)} in collectives across hosts, {size(sums.network_bytes)}"
        " through each network card"
    )
    names = ["kind", "axis", "links", "size", "times", "sent", "matmuls beside", "other", "adds"]
    return _table(names, rows, words=3, caption=words, marked=opened)


def _table(
    names: Sequence[str],
    rows: Sequence[Sequence[str]],
    words: int = 1,
    caption: str = "",
    marked: Sequence[bool] = (),
) -> str:
    def cells(tag: str, row: Sequence[str]) -> str:
        return "".join(
            f"<{tag}{' class=word' if i < words else ''}>{escape(cell)}</{tag}>"
            for i, cell in enumerate(row)
        )

    body = "".join(
        f"<tr{' class=open' if i < len(marked) and marked[i] else ''}>{cells('td', row)}</tr>"
        for i, row in enumerate(rows)
    )
    said = f"<caption>{escape(caption)}</caption>" if caption else ""
    return f"<table>{said}<thead><tr>{cells('th', names)}</tr></thead><tbody>{body}</tbody></table>"


def _svg(height: float, label: str, shapes: Iterable[str]) -> str:
    return (
        f'<svg viewBox="0 0 {_WIDTH} {height:.0f}" width="{_WIDTH}" role="img"'
        f' aria-label="{escape(label)}">{"".join(shapes)}</svg>'
    )


def _rect(
    x: float, y: float, width: float, height: float, fill: str, title: str, edge: bool = False
) -> str:
    line = ' stroke="#fff" stroke-width=".6"' if edge else ""
    return (
        f'<rect x="{x:.2f}" y="{y:.1f}" width="{max(width, 0):.2f}" height="{height:.0f}"'
        f' fill="{fill}"{line}><title>{escape(title)}</title></rect>'
    )


def _text(x: float, y: float, words: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}">{escape(words)}</text>'


def _key(names: Iterable[tuple[str, str]]) -> str:
    spans = "".join(
        f'<span><i style="background:{colour}"></i>{escape(name)}</span>' for name, colour in names
    )
    return f'<p class="key">{spans}</p>'
