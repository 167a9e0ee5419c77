"""Configs: schema, recipes, composition, checks, and what is built from them."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mlotool.config.building import Analysis, Built, build_module, derived_seed, hypergradient_options
    from mlotool.config.checks import build, check
    from mlotool.config.composition import CONFIG_NAME, VERSION_KEYWORDS, compose
    from mlotool.config.hydra_errors import config_errors
    from mlotool.config.provenance import Origin, finish_provenance, note_resume, write_provenance
    from mlotool.config.recipes import RecipeInfo, find_recipe, list_recipes, package_dir
    from mlotool.config.run_config import differences, load_run_config
    from mlotool.config.security.safety import check_recipe_file
    from mlotool.config.security.trusted import trust, trust_all
    from mlotool.config.sources import register_sources

_HOMES = {
    "mlotool.config.building": ("Analysis", "Built", "build_module", "derived_seed", "hypergradient_options"),
    "mlotool.config.checks": ("build", "check"),
    "mlotool.config.composition": ("CONFIG_NAME", "VERSION_KEYWORDS", "compose"),
    "mlotool.config.hydra_errors": ("config_errors",),
    "mlotool.config.provenance": ("Origin", "finish_provenance", "note_resume", "write_provenance"),
    "mlotool.config.recipes": ("RecipeInfo", "find_recipe", "list_recipes", "package_dir"),
    "mlotool.config.run_config": ("differences", "load_run_config"),
    "mlotool.config.security.safety": ("check_recipe_file",),
    "mlotool.config.sources": ("register_sources",),
    "mlotool.config.security.trusted": ("trust", "trust_all"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}
__all__ = ["CONFIG_NAME", "VERSION_KEYWORDS", "build", "check", "check_recipe_file", "compose", "config_errors"]
__all__ += ["Analysis", "Built", "build_module", "derived_seed", "hypergradient_options", "register_sources"]
__all__ += ["RecipeInfo", "differences", "find_recipe", "list_recipes", "load_run_config", "package_dir"]
__all__ += ["Origin", "finish_provenance", "note_resume", "trust", "trust_all", "write_provenance"]


def __getattr__(name: str) -> Any:
    # Lazy (PEP 562): Hydra takes a third of a second to import. No file here may have the name of a function above,
    # or importing it would put the module in the function's place.
    if name in _HOME_OF:
        return getattr(import_module(_HOME_OF[name]), name)
    raise AttributeError(f"module 'mlotool.config' has no attribute '{name}'")
