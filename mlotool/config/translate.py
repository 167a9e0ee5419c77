from mlotool.core.errors import ConfigError
def translate(error):
    raise error
