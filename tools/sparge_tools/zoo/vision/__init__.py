"""Models of the zoo that are plain modules, each with a task that measures it."""
