"""`mlotool schema`: the JSON schema of a recipe file, for editors."""

import json
from collections.abc import Sequence

from mlotool.cli.arguments import VerbParser

DESCRIPTION = """Print the JSON schema of a recipe file, by which editors complete keys and check values.

  mlotool schema > recipe.schema.json

In VS Code with the YAML extension, put this line at the top of a recipe:

  # yaml-language-server: $schema=../recipe.schema.json
"""


def main(words: Sequence[str]) -> int:
    """Print the schema."""
    VerbParser("schema", DESCRIPTION).parse(words)
    from mlotool.config.json_schema import recipe_schema

    print(json.dumps(recipe_schema(), indent=1))
    return 0
