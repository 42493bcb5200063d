"""Run commands of this project as child processes, one after the other, each with a log, a limit and a verdict."""
