// What every level is made of. A level's source has its compiler flags, includes this and its own lanes, and names them in ZIPCCL_LEVEL.
#pragma once
#include "cpu/delta/delta_chunk.h"
#include "cpu/encode.h"
#include "cpu/hash.h"
#include "cpu/level.h"
#include "cpu/lossy/lowrank.h"
#include "cpu/lossy/rounded.h"
#include "cpu/lossy/scaled.h"
#include "cpu/lossy/squared_error.h"
#include "cpu/rows/rows.h"
#include "cpu/sum.h"
