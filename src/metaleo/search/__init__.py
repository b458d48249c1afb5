"""Random search of hyper-parameters, by one worker or by several that share a study."""
