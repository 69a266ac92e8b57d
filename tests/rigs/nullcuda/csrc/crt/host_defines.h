// What driver_types.h needs of the compiler's own header, which torch's wheels leave out.
#pragma once
#define __device_builtin__
#define __cudart_builtin__
#define __device_builtin_texture_type__
#define __device_builtin_surface_type__
#define __host__
#define __device__
#define CUDARTAPI
#define CUDARTAPI_CDECL
#define __align__(n) __attribute__((aligned(n)))
#define __builtin_align__(n) __align__(n)
