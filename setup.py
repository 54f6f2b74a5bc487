"""What ``pyproject.toml`` cannot say: recipes and the catalogue lie beside the package and are installed inside it.

``weft/shipped.py`` finds them in either place. Everything else about the project stands in ``pyproject.toml``.
"""

from setuptools import find_packages, setup

SHIPPED = {"recipes": ["*.toml"], "docs": ["techniques.md"]}

setup(
    packages=[*find_packages(include=["weft*"]), *(f"weft.shipped_files.{folder}" for folder in SHIPPED)],
    package_dir={f"weft.shipped_files.{folder}": folder for folder in SHIPPED},
    package_data={f"weft.shipped_files.{folder}": files for folder, files in SHIPPED.items()}
    | {"weft": ["*.html", "*/*.html", "*/*.svg", "*/*.css", "planner/*.toml", "planner/*.txt"]},
)
