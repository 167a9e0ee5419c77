"""Two moons with wrong labels: a classifier, and above it the rates of the mistakes, learned on a few clean samples."""
