"""Runs that are followed by a tracker of Accelerate's."""

import pytest
from peers import need

from attnlab.training import runs
from attnlab.training.recipe import resolve_recipe

pytestmark = pytest.mark.ecosystem
SMALL = {"data": "lexicon", "model": "tiny", "steps": "4", "evaluate_every": "2"}


def train(folder, tracker: str) -> None:
    recipe = resolve_recipe("synthetic", SMALL | {"logging": tracker})
    runs.start_run(recipe, out=str(folder), device="cpu", report=lambda values: None, note=print)


@need("tensorboard")
def test_tensorboard_has_every_measurement(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    train(tmp_path / "run", "tensorboard")
    steps = []
    for file in (tmp_path / "run").rglob("events.out.tfevents*"):  # one is of the recipe's settings
        found = EventAccumulator(str(file))
        found.Reload()
        steps += [each.step for each in found.Scalars("valid_loss")] if "valid_loss" in found.Tags()["scalars"] else []
    assert steps == [2, 4]


@need("mlflow")
def test_mlflow_has_every_measurement(tmp_path, monkeypatch):
    import mlflow

    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "store").as_uri())
    mlflow.set_tracking_uri((tmp_path / "store").as_uri())
    train(tmp_path / "run", "mlflow")
    client = mlflow.MlflowClient((tmp_path / "store").as_uri())
    (run,) = client.search_runs([each.experiment_id for each in client.search_experiments()])
    assert [each.step for each in client.get_metric_history(run.info.run_id, "valid_loss")] == [2, 4]
    assert run.data.params["training.steps"] == "4"


@need("wandb")
def test_wandb_has_every_measurement_without_a_network(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    train(tmp_path / "run", "wandb")
    import wandb

    wandb.finish()
    (file,) = tmp_path.rglob("offline-run-*/*.wandb")
    assert file.read_bytes().count(b"valid_loss") >= 2
