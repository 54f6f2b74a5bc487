"""What ``pyproject.toml`` cannot say: recipes and the catalogue lie beside the package and are installed inside it.

``weft/recipe/shipped.py`` finds them in either place. Everything else about the project stands in ``pyproject.toml``.
"""

from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py

SHIPPED = {"recipes": "**/*.toml", "docs": "reference/techniques.md"}


class BuildPackage(build_py):
    """Puts what is shipped into the package of a wheel; an editable install finds it beside the package."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            for source, target in self._shipped().items():
                self.mkpath(str(target.parent))
                self.copy_file(str(source), str(target))

    def _shipped(self) -> dict[Path, Path]:
        """The files, and where they go."""
        inside = Path(self.build_lib, "weft/shipped_files")
        return {
            file: inside / file
            for folder, names in SHIPPED.items()
            for file in sorted(Path(folder).glob(names))
        }

    def get_source_files(self) -> list[str]:
        return [*super().get_source_files(), *map(str, self._shipped())]

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:
        shipped = [] if self.editable_mode else list(map(str, self._shipped().values()))
        return [*super().get_outputs(include_bytecode), *shipped]


setup(
    packages=find_packages(include=["weft*"]),
    # Said although it is so anyway: an editable install is then a path, and not a finder, which a clone's own folder,
    # named weft as well, would hide from whoever starts Python beside it.
    package_dir={"": "."},
    package_data={
        "weft": [
            "*.html",
            "*/*.html",
            "*/*.c",
            "*/*.h",
            "*/*.svg",
            "*/*.css",
            "*/*.toml",
            "planner/*.txt",
        ]
    },
    cmdclass={"build_py": BuildPackage},
)
