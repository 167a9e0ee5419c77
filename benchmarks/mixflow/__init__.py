"""Memory and time of gradients through gradients: reverse and forward products, with blocks evaluated again."""
