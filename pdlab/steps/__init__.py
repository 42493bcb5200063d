"""Run commands of pdlab one after the other as child processes, each with a log, a time limit and a verdict."""
