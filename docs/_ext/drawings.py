"""The pictures of the reference: what each group of a plan's fields moves."""

from __future__ import annotations

from pathlib import Path


INK, SOFT = "#1c2333", "#45506b"
BOX = {
    "plain": "#eef1f8",
    "data": "#56B4E9",
    "grad": "#E69F00",
    "opt": "#9fd8c6",
    "idle": "#ececec",
}


class Picture:
    """An SVG of boxes, words and arrows."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self.parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}"'
            f' width="{width}" height="{height}" font-family="system-ui, sans-serif"'
            ' font-size="13">'
            f"<title>{title}</title>"
            '<defs><marker id="a" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7"'
            f' markerHeight="7" orient="auto"><path d="M0 0 L8 4 L0 8 z" fill="{SOFT}"/></marker>'
            f'</defs><rect width="{width}" height="{height}" fill="#fff"/>'
        ]

    def box(self, x: float, y: float, w: float, h: float, words: str = "", kind: str = "plain"):
        """A box with words in its middle."""
        self.parts.append(
            f'<rect x="{x}" y="{y}" width="{w}" height="{h}" rx="4" fill="{BOX[kind]}"'
            f' stroke="{SOFT}"/>'
        )
        self.words(x + w / 2, y + h / 2 + 5, words)

    def words(self, x: float, y: float, words: str, anchor: str = "middle", soft: bool = False):
        """One line."""
        if words:
            colour = SOFT if soft else INK
            self.parts.append(
                f'<text x="{x}" y="{y}" text-anchor="{anchor}" fill="{colour}">{words}</text>'
            )

    def arrow(self, x: float, y: float, to_x: float, to_y: float, words: str = ""):
        """An arrow with words above its middle."""
        self.parts.append(
            f'<path d="M{x} {y} L{to_x} {to_y}" stroke="{SOFT}" stroke-width="1.5" fill="none"'
            ' marker-end="url(#a)"/>'
        )
        self.words((x + to_x) / 2, (y + to_y) / 2 - 6, words, soft=True)

    def svg(self) -> str:
        """The file."""
        return "\n".join([*self.parts, "</svg>"])


def layout() -> Picture:
    """Axes of the mesh, and what each divides."""
    p = Picture(720, 236, "Plan: layout")
    for replica in range(2):
        y = 34 + replica * 76
        p.words(88, y + 32, f"replica {replica}", "end", soft=True)
        for device in range(4):
            x = 100 + device * 110
            p.box(x, y, 98, 54)
            p.box(x + 4 + device * 23, y + 6, 20, 20, kind="data")
            p.words(x + 49, y + 46, f"rows {replica * 4 + device}")
    p.words(320, 22, "data: a shard of every leaf, and rows of the batch, on each device")
    p.words(545, 66, "replica: the same shards", "start", soft=True)
    p.words(545, 84, "again, other rows", "start", soft=True)
    p.words(545, 128, "tensor, context: part a", "start", soft=True)
    p.words(545, 146, "layer, a sequence further", "start", soft=True)
    p.words(40, 212, "pipe: layers", "start")
    for stage in range(4):
        p.box(140 + stage * 105, 193, 95, 30, f"layers {3 * stage}-{3 * stage + 2}", "opt")
    return p


def memory() -> Picture:
    """The tiers, and what a step brings to the device."""
    p = Picture(720, 210, "Plan: memory")
    for number, (name, words) in enumerate(
        [("device", "HBM"), ("host", "pinned memory"), ("disk", "files, checksums")]
    ):
        p.box(20 + number * 240, 40, 200, 130)
        p.words(120 + number * 240, 30, f"{name}: {words}")
    p.box(35, 55, 80, 40, "params", "data")
    p.box(35, 110, 80, 40, "activations", "grad")
    p.box(128, 55, 80, 40, "piece", "opt")
    p.box(275, 55, 170, 40, "opt_state, master", "opt")
    p.box(515, 55, 170, 40, "opt_state", "opt")
    p.arrow(275, 70, 210, 70)
    p.arrow(210, 86, 275, 86)
    p.arrow(515, 75, 448, 75)
    p.words(270, 122, "stream_bytes at a time", "start", soft=True)
    p.words(270, 146, "update_on: here or there", "start", soft=True)
    p.words(20, 195, "remat, microbatches: how many activations", "start", soft=True)
    p.words(700, 195, "tiers: where each part lies between steps", "end", soft=True)
    return p


def communication() -> Picture:
    """When weights are gathered and gradients reduced."""
    p = Picture(720, 190, "Plan: communication")
    p.words(20, 24, "A step, from left to right (zero=3)", "start")
    for number, words in enumerate(
        ["forward 0", "forward 1", "backward 1", "backward 0", "update"]
    ):
        p.box(20 + number * 138, 90, 126, 36, words, "opt" if number == 4 else "plain")
    for number in range(4):
        p.box(30 + number * 138, 40, 106, 24, "gather", "data")
        p.arrow(83 + number * 138, 66, 83 + number * 138, 88)
    for number in (2, 3):
        p.arrow(83 + number * 138, 128, 83 + number * 138, 146)
        p.box(30 + number * 138, 148, 106, 24, "reduce", "grad")
    p.words(24, 164, "gather, gather_dtype, secondary: blue", "start", soft=True)
    p.words(570, 156, "reduce,", "start", soft=True)
    p.words(570, 174, "reduce_dtype: orange", "start", soft=True)
    return p


def pipeline() -> Picture:
    """A 1F1B schedule of 3 ranks and 4 microbatches, from the simulator."""
    from fzero.pipeline import Cost, one_f_one_b, simulate

    timeline = simulate(one_f_one_b(3, 4), Cost(f=1.0, b=2.0))
    p = Picture(720, 176, "Plan: pipeline")
    scale = 620 / timeline.makespan_s
    said = "schedule: who computes which microbatch when; partition: which layers a rank has"
    p.words(80, 22, said, "start")
    for rank, row in enumerate(timeline.rank_events):
        y = 36 + rank * 44
        p.words(74, y + 22, f"rank {rank}", "end", soft=True)
        p.box(80, y, timeline.makespan_s * scale, 34, kind="idle")
        for event in row:
            kind = "data" if event.action.kind == "F" else "grad"
            width = (event.end_s - event.start_s) * scale
            words = f"{event.action.kind}{event.action.microbatch}"
            p.box(80 + event.start_s * scale, y, width, 34, words, kind)
    return p


def numerics() -> Picture:
    """Masters, what computes, gradients and the update."""
    p = Picture(720, 180, "Plan: numerics")
    p.box(20, 60, 130, 46, "float32 master", "opt")
    p.box(230, 60, 130, 46, "bf16 or fp16 copy", "data")
    p.box(450, 60, 90, 46, "gradients", "grad")
    p.box(630, 60, 70, 46, "update", "plain")
    p.arrow(150, 83, 228, 83, "precision")
    p.arrow(360, 83, 448, 83, "loss_scale")
    p.arrow(540, 83, 628, 83, "clip_norm")
    p.arrow(665, 106, 665, 144)
    p.arrow(665, 146, 90, 146)
    p.arrow(85, 146, 85, 108)
    p.words(370, 138, "not finite: the state stays as it was (fp16, skip_nonfinite)", soft=True)
    return p


def draw(folder: Path) -> None:
    """Writes all of them, unless they are there as they should be."""
    folder.mkdir(parents=True, exist_ok=True)
    for make in (layout, memory, communication, pipeline, numerics):
        target, text = folder / f"plan-{make.__name__}.svg", make().svg()
        if not target.exists() or target.read_text() != text:
            target.write_text(text)
