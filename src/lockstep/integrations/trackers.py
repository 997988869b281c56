"""Where runs are compared: TensorBoard, Weights & Biases, MLflow. They get what `lockstep.watch` sees.

    from lockstep.integrations.trackers import MLflow, TensorBoard, WandB

    lockstep.watch(model, trackers=[TensorBoard("board/"), WandB(project="mine"), MLflow("mine")])

Loss, gradient norm, learning rate, samples a second, efficiency, where the time goes and who is slow, of all workers
together, and the verdicts in words. The loss is known from `Trainer`, from the integrations of Lightning and
transformers, and from `watcher.log(loss=loss)` in a loop of your own.

Each of them is a `Tracker`: a class with `open`, `log`, `tell` and `close`. Anything with these can take their place.
"""

import time
from collections.abc import Mapping
from typing import Any

from lockstep.watching.live import TensorBoard as TensorBoard
from lockstep.watching.live import Tracker as Tracker


class WandB:
    """Weights & Biases: into the run that the script has begun, else into one of its own.

    Takes what `wandb.init` takes. Offline with `mode="offline"`, or WANDB_MODE=offline in the environment.
    """

    def __init__(self, **options: Any) -> None:
        self._options = options
        self._run: Any = None
        self._is_own = False

    def open(self) -> None:
        """Begin a run, if the script has not."""
        import wandb

        self._is_own = wandb.run is None
        self._run = wandb.init(**self._options) if self._is_own else wandb.run
        # The script's own calls of `wandb.log` count their own steps.
        self._run.define_metric("lockstep/step")
        for group in ("training", "speed", "communication", "time", "straggler"):
            self._run.define_metric(f"{group}/*", step_metric="lockstep/step")

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """Log the numbers of a step."""
        self._run.log({**numbers, "lockstep/step": step})

    def tell(self, step: int, verdict: str) -> None:
        """Put a verdict into the run's summary."""
        self._run.summary["lockstep/verdict"] = verdict

    def close(self) -> None:
        """End the run, if it is of its own."""
        if self._is_own:
            self._run.finish()


class MLflow:
    """MLflow: into the run with `run_id`, else into a new one of `experiment`.

    uri: where runs are kept, as `mlflow.set_tracking_uri` takes it; what MLflow is set to, if not given.
    """

    def __init__(
        self,
        experiment: str = "lockstep",
        *,
        uri: str | None = None,
        run_id: str | None = None,
        name: str | None = None,
    ) -> None:
        self._experiment, self._uri, self._name = experiment, uri, name
        self.run_id = run_id
        """The run, once it has begun."""
        self._is_own = run_id is None
        self._client: Any = None

    def open(self) -> None:
        """Begin a run, unless one was given."""
        from mlflow import MlflowClient

        self._client = MlflowClient(self._uri)
        if self.run_id is None:
            found = self._client.get_experiment_by_name(self._experiment)
            experiment = found.experiment_id if found is not None else self._client.create_experiment(self._experiment)
            self.run_id = self._client.create_run(experiment, run_name=self._name).info.run_id

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """Log the numbers of a step, in one call."""
        from mlflow.entities import Metric

        now = time.time_ns() // 1_000_000
        metrics = [Metric(name, value, now, step) for name, value in numbers.items()]
        self._client.log_batch(self.run_id, metrics=metrics)

    def tell(self, step: int, verdict: str) -> None:
        """Make a verdict the run's tag."""
        self._client.set_tag(self.run_id, "lockstep.verdict", verdict)

    def close(self) -> None:
        """End the run, if it is of its own."""
        if self._is_own:
            self._client.set_terminated(self.run_id)
