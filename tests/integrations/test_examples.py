"""The training example, small: three kinds of attention, one loss curve."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import tilewise
import train_gpt

pytestmark = pytest.mark.slow


def test_the_curves_lie_on_each_other_and_go_down(tmp_path: Path) -> None:
    setup = train_gpt.Setup(steps=8, batch=2, seqlen=64, layers=2)
    corpus = train_gpt.text()
    runs = [train_gpt.train(kind, setup, corpus, "cpu") for kind in train_gpt.KINDS]
    eager, *others = (run.losses for run in runs)
    assert eager[-1] < eager[0] - 0.5
    for losses in others:
        assert max(abs(a - b) for a, b in zip(losses, eager, strict=True)) < 1e-4
    table = train_gpt.report(runs, setup)
    assert all(kind in table for kind in train_gpt.KINDS)
    assert "difference" in table
    assert "difference" not in train_gpt.report(runs[:1], setup)
    pytest.importorskip("matplotlib")
    train_gpt.draw(runs, tmp_path / "curves.png")
    assert (tmp_path / "curves.png").stat().st_size > 1000


def test_numbers_below_one_are_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["train_gpt.py", "--steps", "0"])
    with pytest.raises(SystemExit):
        train_gpt.main()
    assert "argument --steps: invalid count value: '0'" in capsys.readouterr().err


@pytest.mark.exhaustive
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the peak of a process is reset by Linux")
def test_memory_is_counted_beyond_the_first_pass(tmp_path: Path) -> None:
    """In a process that compiles its kernels, which takes far more memory than this model does."""
    code = (
        "import train_gpt as t; setup = t.Setup(steps=3, seqlen=128, layers=2); "
        "print(t.train('tilewise', setup, t.text(), 'cpu').peak_bytes)"
    )
    examples = Path(__file__).resolve().parents[2] / "examples"
    source = str(Path(tilewise.__file__).parents[1])
    given = {**os.environ, "PYTHONPATH": source, "TILEWISE_CACHE_DIR": str(tmp_path / "kernels")}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=examples, env=given, capture_output=True, text=True, check=True
    )
    assert 0 < int(done.stdout) < 40 << 20
