"""The command line: one file a verb, each with `main(arguments) -> exit code`. Nothing here imports torch at its top."""
