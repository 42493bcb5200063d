"""The demo: it deploys a tiny model on this machine in three ways, measures each briefly, and draws one plot."""
