"""The typed recipe: a TOML file plus ``section.key=value`` overrides becomes validated, frozen objects.

The same classes build a recipe in Python::

    Recipe(model=ModelShape(layers=4), layout=Layout(shard=2, tp=2), train=Train(steps=100))
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from weft.recipe.adapter import Adapter as Adapter
    from weft.recipe.adapter import VocabularyWeight as VocabularyWeight
    from weft.recipe.checkpoint_section import MEMORY as MEMORY
    from weft.recipe.checkpoint_section import Checkpoint as Checkpoint
    from weft.recipe.checkpoint_section import Level as Level
    from weft.recipe.data_section import ANSWER_PAIRS as ANSWER_PAIRS
    from weft.recipe.data_section import CONVERSATIONS as CONVERSATIONS
    from weft.recipe.data_section import SOURCES as SOURCES
    from weft.recipe.data_section import Chat as Chat
    from weft.recipe.data_section import Data as Data
    from weft.recipe.data_section import Role as Role
    from weft.recipe.data_section import Source as Source
    from weft.recipe.generate_section import Generate as Generate
    from weft.recipe.loss_section import Loss as Loss
    from weft.recipe.memory_section import PLACES as PLACES
    from weft.recipe.memory_section import Memory as Memory
    from weft.recipe.memory_section import Place as Place
    from weft.recipe.model_shape import ModelShape as ModelShape
    from weft.recipe.model_shape import RopeScaling as RopeScaling
    from weft.recipe.observe import Observe as Observe
    from weft.recipe.optimizer import Optimizer as Optimizer
    from weft.recipe.optimizer import ParameterGroup as ParameterGroup
    from weft.recipe.policy_loss_section import PolicyLoss as PolicyLoss
    from weft.recipe.policy_loss_section import SamplerCorrection as SamplerCorrection
    from weft.recipe.policy_loss_section import policy_loss as policy_loss
    from weft.recipe.read import build_recipe as build_recipe
    from weft.recipe.read import load_recipe as load_recipe
    from weft.recipe.recipe import RUNS as RUNS
    from weft.recipe.recipe import Recipe as Recipe
    from weft.recipe.recipe import Use as Use
    from weft.recipe.resilience import Resilience as Resilience
    from weft.recipe.rl_section import Reinforcement as Reinforcement
    from weft.recipe.roles_section import Roles as Roles
    from weft.recipe.sync import Sync as Sync
    from weft.recipe.train_section import Dtype as Dtype
    from weft.recipe.train_section import Train as Train
    from weft.recipe.validation_section import Task as Task
    from weft.recipe.validation_section import Validation as Validation

#: The file of every public name, in this folder.
_FILES = {
    "Adapter": "adapter",
    "VocabularyWeight": "adapter",
    "MEMORY": "checkpoint_section",
    "Checkpoint": "checkpoint_section",
    "Level": "checkpoint_section",
    "ANSWER_PAIRS": "data_section",
    "CONVERSATIONS": "data_section",
    "SOURCES": "data_section",
    "Chat": "data_section",
    "Data": "data_section",
    "Role": "data_section",
    "Source": "data_section",
    "Generate": "generate_section",
    "Loss": "loss_section",
    "PLACES": "memory_section",
    "Memory": "memory_section",
    "Place": "memory_section",
    "ModelShape": "model_shape",
    "RopeScaling": "model_shape",
    "Observe": "observe",
    "Optimizer": "optimizer",
    "ParameterGroup": "optimizer",
    "PolicyLoss": "policy_loss_section",
    "SamplerCorrection": "policy_loss_section",
    "policy_loss": "policy_loss_section",
    "build_recipe": "read",
    "load_recipe": "read",
    "RUNS": "recipe",
    "Recipe": "recipe",
    "Use": "recipe",
    "Resilience": "resilience",
    "Sync": "sync",
    "Dtype": "train_section",
    "Train": "train_section",
    "Task": "validation_section",
    "Validation": "validation_section",
}


def __getattr__(name: str) -> Any:
    """Public names, whose files are read when the names are asked for."""
    if name not in _FILES:
        raise AttributeError(f"module 'weft.recipe' has no attribute {name!r}")
    return getattr(import_module(f"weft.recipe.{_FILES[name]}"), name)
