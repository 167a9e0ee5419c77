raise ImportError("a library that is not there")
