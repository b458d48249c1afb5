"""Metaleo: meta-learning with Latent Embedding Optimization (Rusu et al., ICLR 2019).

What can be imported from here is public and stable; all else is private, and may change without notice.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from metaleo.checkpoints import TrainedModel, load_model
    from metaleo.data.feature_files import load_data, save_data
    from metaleo.data.metaset import MetaSet
    from metaleo.engines import use_engine
    from metaleo.errors import BadInput
    from metaleo.estimators.classifier import LEOClassifier
    from metaleo.estimators.regressor import LEORegressor
    from metaleo.evaluation.evaluate import Evaluation, evaluate
    from metaleo.experiments.compare import Comparison, compare
    from metaleo.learners.base import Adaptation, HyperParams, Learner
    from metaleo.learners.leo import LEO
    from metaleo.learners.linear import LogisticRegression, RidgeRegression
    from metaleo.learners.maml import MAML, MetaSGD, ProtoMAML, Reptile
    from metaleo.learners.metric import CL2N, FEAT, MatchingNet, NearestCentroid, PrototypicalNet, RelationNetLearner
    from metaleo.learners.quadratic import MetaQDA
    from metaleo.nn.heads import LinearHead, Network, gaussian_nll, linear_network
    from metaleo.tasks.episodes import Episodes
    from metaleo.tasks.sines_and_lines import SinesAndLines
    from metaleo.tasks.task import Batch, Task, Tasks, labelled, normalise
    from metaleo.training.meta_train import RunState, meta_train

__version__ = "0.1.0"

PUBLIC = {
    "estimators.classifier": ("LEOClassifier",),
    "estimators.regressor": ("LEORegressor",),
    "data.feature_files": ("load_data", "save_data"),
    "data.metaset": ("MetaSet",),
    "tasks.task": ("Batch", "Task", "Tasks", "labelled", "normalise"),
    "tasks.episodes": ("Episodes",),
    "tasks.sines_and_lines": ("SinesAndLines",),
    "nn.heads": ("LinearHead", "Network", "gaussian_nll", "linear_network"),
    "learners.base": ("Adaptation", "HyperParams", "Learner"),
    "learners.leo": ("LEO",),
    "learners.maml": ("MAML", "MetaSGD", "ProtoMAML", "Reptile"),
    "learners.metric": ("CL2N", "FEAT", "MatchingNet", "NearestCentroid", "PrototypicalNet", "RelationNetLearner"),
    "learners.linear": ("LogisticRegression", "RidgeRegression"),
    "learners.quadratic": ("MetaQDA",),
    "training.meta_train": ("RunState", "meta_train"),
    "evaluation.evaluate": ("Evaluation", "evaluate"),
    "checkpoints": ("TrainedModel", "load_model"),
    "experiments.compare": ("Comparison", "compare"),
    "engines": ("use_engine",),
    "errors": ("BadInput",),
}
"""Public names, by the module that defines them; the order is that of docs/api.md."""
MODULE_OF = {name: module for module, names in PUBLIC.items() for name in names}
__all__ = [
    "CL2N",
    "FEAT",
    "LEO",
    "MAML",
    "Adaptation",
    "BadInput",
    "Batch",
    "Comparison",
    "Episodes",
    "Evaluation",
    "HyperParams",
    "LEOClassifier",
    "LEORegressor",
    "Learner",
    "LinearHead",
    "LogisticRegression",
    "MatchingNet",
    "MetaQDA",
    "MetaSGD",
    "MetaSet",
    "NearestCentroid",
    "Network",
    "ProtoMAML",
    "PrototypicalNet",
    "RelationNetLearner",
    "Reptile",
    "RidgeRegression",
    "RunState",
    "SinesAndLines",
    "Task",
    "Tasks",
    "TrainedModel",
    "compare",
    "evaluate",
    "gaussian_nll",
    "labelled",
    "linear_network",
    "load_data",
    "load_model",
    "meta_train",
    "normalise",
    "save_data",
    "use_engine",
]


def __getattr__(name: str) -> Any:
    """Public names are imported when they are asked for, so that `import metaleo` costs nothing."""
    if name not in MODULE_OF:
        raise AttributeError(f"module 'metaleo' has no attribute {name!r}")
    return getattr(importlib.import_module(f"metaleo.{MODULE_OF[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
