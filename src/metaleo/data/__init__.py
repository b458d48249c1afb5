"""Vectors → meta-sets: feature files and what is in them."""

from metaleo.data.metaset import MetaSet as MetaSet
from metaleo.data.store import EMBEDDED as EMBEDDED
from metaleo.data.store import load as load
from metaleo.data.store import load_sample as load_sample
from metaleo.data.store import save as save
