"""All parts of torch that are not public: everything here may differ in the next release.

Tested with torch 2.13 and 2.11. graphs.py: compiled graphs; parallel.py: process groups,
DistributedDataParallel and FSDP2.
"""
