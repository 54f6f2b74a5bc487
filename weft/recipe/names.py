"""All public names of the recipe, each in the file of its section."""

from weft.recipe.adapter import Adapter, VocabularyWeight
from weft.recipe.checkpoint_section import MEMORY, Checkpoint, Level
from weft.recipe.data_section import (
    ANSWER_PAIRS,
    CONVERSATIONS,
    SOURCES,
    Chat,
    Data,
    Role,
    Source,
)
from weft.recipe.generate_section import Generate
from weft.recipe.loss_section import Loss
from weft.recipe.memory_section import PLACES, Memory, Place
from weft.recipe.model_shape import ModelShape, RopeScaling
from weft.recipe.observe import Observe
from weft.recipe.optimizer import Optimizer, ParameterGroup
from weft.recipe.read import build_recipe, load_recipe
from weft.recipe.recipe import RUNS, Recipe, Use
from weft.recipe.resilience import Resilience
from weft.recipe.sync import Sync
from weft.recipe.train_section import Dtype, Train
from weft.recipe.validation_section import Task, Validation
from weft.section import Section

__all__ = [
    "ANSWER_PAIRS",
    "Adapter",
    "CONVERSATIONS",
    "Chat",
    "Checkpoint",
    "Data",
    "Dtype",
    "Generate",
    "Level",
    "Loss",
    "MEMORY",
    "Memory",
    "ModelShape",
    "Observe",
    "Optimizer",
    "PLACES",
    "ParameterGroup",
    "Place",
    "RUNS",
    "Recipe",
    "Resilience",
    "Role",
    "RopeScaling",
    "SOURCES",
    "Section",
    "Source",
    "Sync",
    "Task",
    "Train",
    "Use",
    "Validation",
    "VocabularyWeight",
    "build_recipe",
    "load_recipe",
]
