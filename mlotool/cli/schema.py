"""Print the JSON schema of a recipe file, by which editors complete keys and check values.

  mlotool schema > recipe.schema.json

In VS Code with the YAML extension, put this line at the top of a recipe:

  # yaml-language-server: $schema=../recipe.schema.json
"""

import json

from mlotool.cli.arguments import VerbParser
from mlotool.config.json_schema import recipe_schema


def main(words: list[str]) -> int:
    """Print the schema."""
    VerbParser("schema", __doc__).parse(words)
    print(json.dumps(recipe_schema(), indent=1))
    return 0
