"""One run of a plan: join, bind, exchange round by round, verify, commit."""
