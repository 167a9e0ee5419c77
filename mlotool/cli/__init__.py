"""The command line: one file a verb, each with `main(arguments) -> exit code`. None imports torch at its top."""
