"""What torch.export does for those who debug it is left undone, and nothing that is read."""

import logging
import threading

import torch
from torch import nn
from torch.export import exported_program
from torch.fx import GraphModule, proxy
from torch.utils._traceback import CapturedTraceback

from torch_bridge.export.origins import source_line
from torch_bridge.export.unread import nothing_unread


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        with torch.no_grad():
            shift = y.mean(0)
        return (y - shift).relu()


def _exported() -> torch.export.ExportedProgram:
    x = torch.randn(4, 3)
    return torch.export.export(_Net(), (x,), strict=False)


def _lines(program: torch.export.ExportedProgram) -> list[tuple[str, str]]:
    return [(node.name, node.meta.get("stack_trace", "")) for node in program.graph.nodes]


def test_each_node_names_the_stack_that_pytorch_names() -> None:
    plainly = _exported()
    with nothing_unread():
        found = _exported()
    assert _lines(found) == _lines(plainly)
    (relu,) = (node for node in found.graph.nodes if node.name == "relu")
    assert "return (y - shift).relu()" in source_line(relu)


def test_a_graph_is_still_code_when_it_is_called() -> None:
    with nothing_unread():
        program = _exported()
        decomposed = program.run_decompositions()
    x = torch.randn(4, 3)
    expected = _Net()(x)
    for one in (program, decomposed):
        torch.testing.assert_close(one.module()(x), expected, rtol=0, atol=0)


def test_no_code_is_written_while_a_graph_is_made(monkeypatch) -> None:
    written = []
    own = GraphModule.recompile
    monkeypatch.setattr(GraphModule, "recompile", lambda self: written.append(1) or own(self))
    _exported()
    plainly = len(written)
    written.clear()
    with nothing_unread():
        _exported()
    assert 0 < len(written) < plainly / 2


def test_records_are_neither_made_nor_lost() -> None:
    log, seen = logging.getLogger("torch.__trace"), []
    handler = logging.Handler()
    handler.emit = seen.append
    log.addHandler(handler)
    try:
        with nothing_unread():
            _exported()
        assert not seen
        _exported()
        assert seen
    finally:
        log.removeHandler(handler)


def test_another_thread_has_its_whole_stack() -> None:
    found: list[object] = []
    with nothing_unread():
        here = proxy.CapturedTraceback.extract()
        other = threading.Thread(target=lambda: found.append(proxy.CapturedTraceback.extract()))
        other.start()
        other.join()
    assert not isinstance(here, CapturedTraceback)
    assert isinstance(found[0], CapturedTraceback)
    assert proxy.CapturedTraceback is CapturedTraceback


def test_composite_operators_are_pytorchs_and_asked_for_once(monkeypatch) -> None:
    plainly = exported_program._collect_all_valid_cia_ops
    with nothing_unread():
        inside = exported_program._collect_all_valid_cia_ops
        assert inside is not plainly
        assert inside() == plainly()
        assert inside() is inside()
    assert exported_program._collect_all_valid_cia_ops is plainly
