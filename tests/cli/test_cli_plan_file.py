"""`fzero train --plan FILE --plan-set name=value`: a run as data, which runs again as it is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cli_cases import TINY_CONFIG, Command


RUN = """
[run]
steps = 3
batch = 8
eval_every = 0
seed = 7

[data]
seq = 32
eval_sequences = 8

[plan]
zero = 1
pipe = 2
microbatches = 2
tiers = {opt_state = "host"}

[optimizer]
name = "lion"
b1 = 0.8

[schedule]
name = "linear_schedule"
init_value = 0.01
end_value = 0.0
transition_steps = 3
"""


def test_a_run_in_a_file_runs_again_from_what_it_wrote(
    here: Command, tmp_path: Path, texts: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    file, deep = tmp_path / "run.toml", tmp_path / "deep.json"
    monkeypatch.chdir(tmp_path)
    file.write_text(RUN)
    deep.write_text(json.dumps(TINY_CONFIG | {"n_layer": 4}))  # blocks enough to be cut
    first = here(
        "train", "--plan", file, "--model", f"hf:{deep.name}", "--data", *texts,
        "--out", tmp_path / "a", "--plan-set", "schedule=gpipe", "--clip", 0.5, "--verify",
    )  # fmt: skip
    assert first.status == 0, first.stderr
    monkeypatch.chdir(tmp_path / "a")  # where a path as it was typed would be no file
    again = here("train", "--plan", "run.json", "--out", tmp_path / "b")
    assert again.status == 0, again.stderr
    plans, losses = [], []
    for name in "ab":
        summary = json.loads((tmp_path / name / "summary.json").read_text())
        plans.append(summary["plan"])
        lines = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        losses.append([e["loss"] for e in map(json.loads, lines) if "loss" in e])
    assert plans[0] == plans[1]
    said = {"zero": 1, "pipe": 2, "data": 4, "microbatches": 2, "schedule": "gpipe",
            "clip_norm": 0.5}  # fmt: skip
    assert {name: plans[0][name] for name in said} == said
    assert losses[0] == losses[1]
    assert len(losses[0]) == 3
    # The third update of this schedule has a third of the rate; a fourth would have none. Lion's
    # steps are as long as the rate: another optimizer would not come this far in two.
    assert losses[0][2] < losses[0][0] - 0.1


def test_flags_go_before_the_file_and_plan_set_before_flags(
    here: Command, tmp_path: Path, config_file: Path, texts: list[Path]
) -> None:
    file = tmp_path / "run.json"
    file.write_text(json.dumps({
        "run": {"model": f"hf:{config_file}", "batch": 8, "steps": 3}, "data": {"seq": 32},
        "plan": {"zero": 1, "microbatches": 2, "precision": "bf16"},
    }))  # fmt: skip
    out = tmp_path / "out"
    given = ["train", "--plan", file, "--data", *texts, "--out", out]
    # Each is refused for what the winner says.
    assert "--batch 7 must" in here(*given, "--batch", 7).stderr
    assert "gather='lazy' with zero=3" in here(*given, "--gather", "lazy", "--zero", 3).stderr
    lazy = here(*given, "--gather", "lazy", "--zero", 1, "--plan-set", "zero=0")
    assert "gather='lazy' with zero=0" in lazy.stderr


@pytest.mark.parametrize(
    ("text", "more", "message"),
    [
        ("[plan]\nzeero = 3", (), "[plan] 'zeero' is unknown; did you mean 'zero'?"),
        ("[run]\nstep = 3", (), "[run] 'step' is unknown; did you mean 'steps'?"),
        ("[plans]\nzero = 3", (), "section 'plans' is unknown; did you mean 'plan'?"),
        ("[plan\n", (), "expected TOML"),
        ("plan = 3", (), "expected a section [plan]"),
        ("[optimizer]\nb1 = 0.9", (), "[optimizer] has no name"),
        ("[optimizer]\nname = 'adamww'", (), "[optimizer] name 'adamww' is unknown; did you mean"),
        ("[optimizer]\nname = 'adamw'\nb_1 = 1", (), "adamw: 'b_1' is unknown; did you mean"),
        ("", ("--plan-set", "pip=2"), "--plan-set 'pip' is unknown; did you mean 'pipe'?"),
        ("[optimizer]\nname = 'adamw'\nlearning_rate = 1", (), "the rate is [run] lr"),
        ("[run]\nsteps = 'ten'", (), "[run] steps is 'ten': expected a whole number"),
        ("[run]\ndevices = true", (), "[run] devices is True: expected a whole number"),
        ("[run]\nlr = '1'", (), "[run] lr is '1': expected a number"),
        ("[data]\nsources = 5", (), "[data] sources is 5: expected a list of texts"),
        ("[plan]\ntiers = 'host'", (), "tiers='host': expected a tier for each class"),
        ("", ("--plan-set", "pipe"), "expected name=value"),
        ("", ("--plan-set", "tiers={opt_stat = 'host'}"), "tiers='opt_stat': expected one of"),
        ("[plan]\npipe = 3", (), "must be a multiple of 3"),
    ],
)  # fmt: skip
def test_a_wrong_key_names_the_nearest_right_one(
    here: Command, tmp_path: Path, config_file: Path, texts: list[Path],
    text: str, more: tuple[str, ...], message: str,
) -> None:  # fmt: skip
    file = tmp_path / "run.toml"
    file.write_text(text)
    done = here(
        "train", "--plan", file, "--model", f"hf:{config_file}", "--data", *texts, "--seq", 32,
        "--out", tmp_path / "out", *more,
    )  # fmt: skip
    assert done.status == 2
    assert message in " ".join(done.stderr.split())
