"""Pictures of sweeps: what is drawn, in which row, and what is refused."""

import itertools
import subprocess
import sys
from pathlib import Path

import pytest

from vllm_moe_lightning.pipeline.gantt import plot_gantt, simulated_spans
from vllm_moe_lightning.pipeline.schedule import SweepShape, make_schedule
from vllm_moe_lightning.pipeline.simulator import SimulatedSweep, simulate
from vllm_moe_lightning.pipeline.tasks import TaskName
from vllm_moe_lightning.pipeline.trace import ROWS, TraceSpan
from vllm_moe_lightning.resources import Resource

PNG_SIGNATURE = b"\x89PNG"


def sweep(schedule: str = "cgopipe") -> SimulatedSweep:
    shape = SweepShape(num_layers=3, num_micro_batches=2, pages_per_layer=(2, 2, 2))
    is_mark = TaskName.SWEEP_START
    return simulate(make_schedule(schedule, shape), lambda task: 0.0 if task.key.name is is_mark else 0.01, 2)


def test_every_resource_has_a_row() -> None:
    assert sorted(ROWS) == sorted(Resource)


@pytest.mark.parametrize("schedule", ["cgopipe", "serial", "s4"])
def test_spans_of_a_simulation_are_its_tasks_without_the_marks(schedule: str) -> None:
    simulated = sweep(schedule)
    spans = simulated_spans(simulated)
    marks = [i for i in simulated.intervals if i.task.key.name is TaskName.SWEEP_START]
    assert len(spans) == len(simulated.intervals) - len(marks)
    for row in ROWS:  # one task at a time on each
        of_row = sorted((span.start_s, span.end_s) for span in spans if span.resource is row)
        assert all(end <= start + 1e-12 for (_, end), (start, _) in itertools.pairwise(of_row))


@pytest.mark.parametrize("ending", ["png", "svg"])
def test_predicted_and_recorded_sweeps_go_into_one_picture(ending: str, tmp_path: Path) -> None:
    recorded = [
        TraceSpan(Resource.GPU, "post_attention(0,1)", 100.0, 100.2),
        TraceSpan(Resource.H2D, "weight_page(1,0)", 100.1, 100.3, num_bytes=7),
        TraceSpan(Resource.H2D, "fill", 100.3, 100.31),
    ]
    file = tmp_path / "new" / f"gantt.{ending}"
    plot_gantt([("simulated", simulated_spans(sweep())), ("measured, emulated device", recorded)], file)
    content = file.read_bytes()
    assert content.startswith(PNG_SIGNATURE) if ending == "png" else b"<svg" in content
    assert len(content) > 2000


def test_nothing_to_draw_is_refused_with_the_likely_reason(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="was recording on"):
        plot_gantt([("measured", [])], tmp_path / "gantt.png")
    with pytest.raises(ValueError, match="nothing to draw"):
        plot_gantt([], tmp_path / "gantt.png")


def test_matplotlib_is_loaded_only_when_drawing() -> None:
    code = "import sys, vllm_moe_lightning.pipeline.gantt; assert 'matplotlib' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
