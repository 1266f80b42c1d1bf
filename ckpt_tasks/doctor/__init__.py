"""What `ckpt doctor` checks: each check is a row of one table, with what was seen and what to do."""
