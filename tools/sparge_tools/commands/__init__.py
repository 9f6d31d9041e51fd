"""The tools' commands of the console program `sparge`."""
