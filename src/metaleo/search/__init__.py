"""Random search of hyper-parameters, alone or shared by several machines."""
