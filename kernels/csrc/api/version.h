// The version of the C ABI. Apart from the other headers, because a change of it then compiles only
// runtime.cu again. Part of api.h.
#pragma once

// Raised whenever a prototype or the meaning of an argument changes.
#define TRIDECODE_ABI_VERSION 28
