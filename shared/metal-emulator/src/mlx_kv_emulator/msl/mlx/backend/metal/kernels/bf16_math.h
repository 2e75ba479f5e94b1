#pragma once
// metal_stdlib here has all functions of bfloat already.
