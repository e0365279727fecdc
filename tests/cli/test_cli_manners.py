"""Manners of the command: one line and a status for an error, completion, quick help, a doctor."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from cli_cases import Command

import fzero_command
from fzero.cli import doctor
from fzero.cli.launch import launch_all
from fzero.hosts.watch import EXIT_PEER_LOST


RUN = "import sys, fzero_command; sys.argv[0] = 'fzero'; fzero_command.main()"


# A call of each command that cannot be carried out.
WRONG = {
    "bridge": ["check", "--model", "hf:nowhere"],
    "calibrate": ["--out", "nowhere/rates.json", "--small", "--wrong"],
    "convert": ["nowhere", "there.pt"],
    "doctor": ["--path", "nowhere"],
    "eval": ["--model", "hf:nowhere"],
    "generate": ["--model", "nowhere", "--prompt", "a"],
    "import-config": ["nowhere.json"],
    "inspect": ["nowhere"],
    "launch": ["--", "nowhere"],
    "preflight": ["--model", "hf:nowhere", "--topology", "x1:8"],
    "report": ["nowhere"],
    "schedule": ["check", "nowhere.csv"],
    "train": ["--model", "hf:nowhere", "--out", "out"],
}


@pytest.mark.parametrize("command", sorted(WRONG))
def test_an_error_of_a_command_is_a_line_and_a_status(
    command: str, here: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = here(command, *WRONG[command])
    assert done.status != 0
    said = done.stdout if command == "doctor" else done.stderr
    assert "Traceback" not in said
    lines = [line for line in said.splitlines() if not line.startswith(("Usage:", "Try "))]
    if command != "doctor":  # its findings are lines of stdout
        assert len([line for line in lines if line.strip()]) == 1, said
    assert any(word in said for word in ("nowhere", "x1", "--wrong"))


def test_every_command_has_a_wrong_call_here() -> None:
    others = {"finetune", "merge"}  # tests of their own
    assert set(fzero_command.commands()) - others == set(WRONG)


def test_debug_shows_where_an_error_came_from(here: Command, tmp_path: Path) -> None:
    quiet = here("report", tmp_path / "nowhere")
    assert quiet.status == 2
    with pytest.raises(Exception, match="no such directory"):
        # Anywhere in the command; the interpreter prints the traceback.
        here("report", tmp_path / "nowhere", "--debug")


def test_an_unexpected_error_is_one_line_too(
    here: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(path: Path) -> None:
        raise RuntimeError("first line\nsecond line")

    monkeypatch.setattr("fzero.runs.files.read_run", broken)
    done = here("report", tmp_path)
    assert done.status == 1
    assert done.stderr == (
        "RuntimeError: first line (fzero --debug ... shows where it came from)\n"
    )


def test_help_loads_nothing_that_is_slow_to_load() -> None:
    slow = {"fzero", "torch_bridge", "jax", "numpy", "optax", "torch"}
    code = f"import atexit, sys; atexit.register(lambda: print({slow} & set(sys.modules))); {RUN}"
    done = subprocess.run([sys.executable, "-c", code, "--help"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "set()"
    for line in ("train +Train a PyTorch", "eval +Print the validation loss", "schedule"):
        assert re.search(line, done.stdout)
    # Each command says in its line what it does, and is not cut off.
    assert "..." not in done.stdout.partition("Commands:")[2]


@pytest.mark.parametrize("command", ["train", "finetune", "preflight"])
def test_help_of_many_options_is_in_groups(command: str, here: Command) -> None:
    groups = here(command, "--help").stdout.split("\n\n")
    assert sum(group.startswith(("Plan:", "Results:")) for group in groups) == 2
    assert groups[-1].split()[:2] == ["Options:", "--help"]
    assert len(groups[-1].splitlines()) == 2  # nothing else was left without a group


def with_fzero(folder: Path) -> dict[str, str]:
    """An environment whose path has a `fzero` of this source tree."""
    (folder / "fzero").write_text(f'#!/bin/sh\nexec {sys.executable} -c "{RUN}" "$@"\n')
    (folder / "fzero").chmod(0o755)
    environ = os.environ | {"PATH": f"{folder}:{os.environ['PATH']}"}
    return environ | {"PYTHONPATH": os.pathsep.join(sys.path[1:])}


@pytest.mark.parametrize(("typed", "expected"), [
    ("fzero sch", ["schedule"]),
    ("fzero report --tr", ["--trace"]), ("fzero --de", ["--debug"]),
])  # fmt: skip
def test_bash_completes(typed: str, expected: list[str], tmp_path: Path) -> None:
    """In a real bash, with the script that `fzero --show-completion` gives."""
    environ = with_fzero(tmp_path)
    words = typed.split()
    script = f"""
source <(_FZERO_COMPLETE=source_bash fzero)
COMP_WORDS=({typed}); COMP_CWORD={len(words) - 1}; COMP_LINE='{typed}'; COMP_POINT={len(typed)}
complete -p fzero
_fzero_completion fzero {words[-1]} {words[-2]}
printf '%s\\n' "${{COMPREPLY[@]}}"
"""
    bash = shutil.which("bash") or "bash"
    done = subprocess.run(
        [bash, "-c", script], capture_output=True, text=True, timeout=600, env=environ
    )
    lines = done.stdout.split()
    assert "fzero" in lines, done.stderr  # `complete -p` knows the function
    for word in expected:
        assert word in lines


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_get_a_script(
    shell: str, here: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("_FZERO_COMPLETE", f"source_{shell}")
    done = here()
    assert done.status == 0
    assert "compdef" in done.stdout if shell == "zsh" else "complete --command fzero" in done.stdout


def test_fish_and_zsh_complete_where_they_are(tmp_path: Path) -> None:
    environ = with_fzero(tmp_path) | {"TERM": "dumb", "HOME": str(tmp_path)}
    fish, zsh = shutil.which("fish"), shutil.which("zsh")
    if fish is not None:
        script = "_FZERO_COMPLETE=source_fish fzero | source; complete -C 'fzero sch'"
        done = subprocess.run(
            [fish, "-c", script], capture_output=True, text=True, timeout=600, env=environ
        )
        assert done.stdout.split()[:1] == ["schedule"], done.stderr
    if zsh is not None:
        setup = "autoload -Uz compinit && compinit -u; source <(_FZERO_COMPLETE=source_zsh fzero)"
        typed = [(f"{setup}; echo has-$((1 + 1))\n", "has-2"), ("fzero sch\t", "fzero schedule")]
        assert said_in_a_terminal([zsh, "-f", "-i"], typed, environ)


def said_in_a_terminal(
    command: list[str], typed: list[tuple[str, str]], environ: dict[str, str]
) -> bool:
    """Whether what stands beside each text to type appears after it, in ten minutes."""
    own, other = pty.openpty()
    with subprocess.Popen(
        command, stdin=other, stdout=other, stderr=other, env=environ, start_new_session=True
    ) as shell:
        os.close(other)
        try:
            for text, expected in typed:
                os.write(own, text.encode())
                said = b""
                while expected.encode() not in said:
                    if not select.select([own], [], [], 600)[0]:
                        return False
                    said += os.read(own, 4096)
            return True
        finally:
            shell.kill()
            os.close(own)


def test_the_doctor_finds_this_machine_well(here: Command, tmp_path: Path) -> None:
    done = here("doctor", "--path", tmp_path, "--json")
    found = json.loads(done.stdout)
    states = {one["what"]: one["state"] for one in found["findings"]}
    assert done.status == 0, found
    assert found["ok"]
    for what in ("python", "jax", "devices", "memory kinds", "processes", "disk", "free space"):
        assert states[what] in ("ok", "warn"), what
    said = {one["what"]: one["found"] for one in found["findings"]}
    assert "8 x cpu" in said["devices"]
    assert "pinned_host" in said["memory kinds"]
    assert "MB/s" in said["disk"]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("what", "planted"), [
    ("jax", "version"), ("processes", "half a world"), ("devices", "a GPU that jax does not use"),
])  # fmt: skip
def test_the_doctor_says_what_would_fail_and_how_to_mend_it(
    what: str, planted: str, here: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if what == "jax":
        real = doctor.version
        monkeypatch.setattr(doctor, "_requirements", lambda: {"jax": ">=0.10,<0.12"})
        monkeypatch.setattr(doctor, "version", lambda n: "0.9.1" if n == "jax" else real(n))
    elif what == "processes":
        monkeypatch.setenv("RANK", "1")
        monkeypatch.setenv("WORLD_SIZE", "2")
    else:
        monkeypatch.setattr(doctor, "_has_nvidia", lambda: True)
    done = here("doctor", "--path", tmp_path)
    assert done.status == 1
    (row,) = [i for i, line in enumerate(done.stdout.splitlines()) if line.startswith("FAIL")]
    first, mend = done.stdout.splitlines()[row : row + 2]
    assert what in first
    assert mend.startswith("      ")
    assert mend.strip()


@pytest.mark.parametrize(("version", "wants", "within"), [
    ("0.10.2", ">=0.10,<0.12", True), ("0.12.0", ">=0.10,<0.12", False),
    ("0.9.9", ">=0.10,<0.12", False), ("2.13.0+cpu", ">=2.9", True),
])  # fmt: skip
def test_versions_are_compared_as_numbers(version: str, wants: str, within: bool) -> None:
    assert doctor._within(version, wants) == within


# What a launched process does, by its rank.
FIRST = {
    "killed": ("os.kill(os.getpid(), signal.SIGKILL)", 137, "SIGKILL"),
    "raised": ("time.sleep(0.2); print('row 7 is no number'); sys.exit(3)", 3, "row 7 is no"),
}


@pytest.mark.parametrize("how", FIRST)
def test_the_launcher_tells_of_the_process_that_failed_and_not_of_those_it_ended(
    how: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Process 0 ends as one that lost a peer, before the other one in the second case."""
    fails, code, words = FIRST[how]
    lost = f"if os.environ['RANK'] == '0': sys.exit({EXIT_PEER_LOST})"
    does = f"import os, signal, sys, time\n{lost}\n"
    assert launch_all([sys.executable, "-S", "-c", does + fails], 2, tmp_path) == code
    said = capsys.readouterr().err
    assert "process 1 of 2 ended first" in said
    assert words in said
