"""Meta-Weight-Net, one cycle at a time: Betty, a bare loop and mlotool."""
