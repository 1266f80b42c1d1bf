"""The checks of `ckpt doctor`: each is a row of one table, with what was observed and what to do."""
