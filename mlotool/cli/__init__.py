"""Bilevel and multilevel optimization: train a YAML recipe, and write a run folder.

usage: mlotool COMMAND [arguments]

commands:
{verbs}

options (of every command):
  -h, --help   what a command does and accepts
  --debug      show the traceback of an error
  --version    the version

examples:
  mlotool run mwn                                          train a built-in recipe
  mlotool run mwn hypergradient=cg seed=1                  with other settings
  mlotool run -m mwn seed=0,1,2                            a sweep, one folder per job
  mlotool copy mwn && mlotool run recipes/mwn.yaml         your own recipe
  mlotool new mypackage                                    your own code

exit codes: 0 done, 1 a run failed, 2 wrong usage or configuration, 130 Ctrl-C, 143 SIGTERM
completion: eval "$(mlotool -sc install=bash)"
"""
